"""Accuracy of a model on Knights-and-Knaves puzzles, per data source, by vLLM offline (GPU or CPU).

python -m arlopti_openrlhf.cli.evaluate --model PATH --data test.jsonl --out result.json
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from arlopti_openrlhf import cpu
from rewards.kk_reward import assistant_turn, grade


def main() -> None:
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face model directory or name, with a chat template")
    parser.add_argument("--data", required=True, help="JSONL of prepare_data: prompt, label, datasource")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--samples", type=int, default=8, help="samples per puzzle (default 8)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cpu.enable()
    rows = [json.loads(line) for line in open(args.data, encoding="utf-8")]
    result = evaluate(args.model, rows, args.samples, args.temperature, args.max_new_tokens, args.seed)
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for source, measures in result.items():
        print(f"{source:>8}: " + ", ".join(f"{name} {value:.3g}" for name, value in measures.items()))


def evaluate(
    model: str, rows: Sequence[dict], samples: int, temperature: float, max_new_tokens: int, seed: int
) -> dict[str, dict[str, float]]:
    """Samples `samples` answers per row, and a greedy one, and grades them.

    Returns:
        Per data source, and for "all": what `summarize` gives, `greedy` (accuracy) and `response_length` (tokens).
    """
    from vllm import LLM, SamplingParams

    # Few CPUs have bf16 instructions: float32 is the fast type there.
    dtype = "float32" if cpu.uses_cpu() else "auto"
    engine = LLM(model, seed=seed, enforce_eager=True, dtype=dtype, max_num_seqs=1024)
    tokenizer = engine.get_tokenizer()
    prompts = [_prompt_text(row["prompt"], tokenizer) for row in rows]
    # Tokenized here, as OpenRLHF does it: the text already holds every special token.
    inputs = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in prompts]

    def scores(**sampling) -> tuple[list[list[float]], list[float]]:
        parameters = SamplingParams(max_tokens=max_new_tokens, skip_special_tokens=False, **sampling)
        outputs = engine.generate(inputs, parameters)
        graded = [
            [grade(assistant_turn(text + o.text, text), row["label"]).score for o in output.outputs]
            for row, text, output in zip(rows, prompts, outputs, strict=True)
        ]
        return graded, [fmean(len(o.token_ids) for o in output.outputs) for output in outputs]

    sampled, lengths = scores(n=samples, temperature=temperature)
    greedy, _ = scores(temperature=0.0)
    members = defaultdict(list)
    for i, row in enumerate(rows):
        members[row["datasource"]].append(i)
    members["all"] = list(range(len(rows)))
    return {
        source: {
            **summarize([sampled[i] for i in indices]),
            "greedy": fmean(greedy[i][0] for i in indices),
            "response_length": fmean(lengths[i] for i in indices),
        }
        for source, indices in sorted(members.items())
    }


def summarize(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Measures of `scores[puzzle][sample]`, 1 where the answer is right, else 0.

    Returns:
        `accuracy` of the samples; `n` puzzles; `ci95`, the half-width of its 95% interval, clustered by puzzle (the
        samples of one puzzle are not independent); `pass@k`, the share of puzzles that one of their k samples solves.
    """
    per_puzzle = [fmean(samples) for samples in scores]
    standard_error = stdev(per_puzzle) / len(per_puzzle) ** 0.5 if len(per_puzzle) > 1 else 0.0
    return {
        "accuracy": fmean(per_puzzle),
        "n": len(per_puzzle),
        "ci95": 1.96 * standard_error,
        f"pass@{len(scores[0])}": fmean(max(samples) for samples in scores),
    }


def _prompt_text(prompt: str | list[dict], tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


if __name__ == "__main__":
    main()
