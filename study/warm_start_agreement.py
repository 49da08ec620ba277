"""Ask each warm start which token methods would lower noise and which signal, as `analyze` does, before any training.

    python -m study.warm_start_agreement --work FOLDER

It takes the warm starts that are in the folder of `study.run --family`, divides the tokens by probability and by
entropy, and adds a line for each to study/results/agreement.jsonl. `python -m study.report` holds them
against what training then showed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from arlopti_openrlhf import cpu

cpu.enable()

from arlopti_openrlhf.lab.analysis import gradient_agreement, rollouts  # noqa: E402
from arlopti_openrlhf.lab.analysis.policy import Policy  # noqa: E402
from arlopti_openrlhf.lab.scoring.inputs import encode  # noqa: E402
from study import runs  # noqa: E402
from study.runs import ROOT  # noqa: E402
from study.sampler import sample  # noqa: E402
from study.stored import AGREEMENT, RESULTS, STAMP, load_agreements, sha256, write  # noqa: E402
from study.summary import rounded  # noqa: E402
from study.validation import DIVISIONS  # noqa: E402

PROMPTS = 256
_MICRO_BATCH_TOKENS = 16_384


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m study.warm_start_agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "variants", help="folder of the warm starts")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed, condition in sorted({(run.seed, run.condition) for run in runs.FAMILY}):
        inputs = args.work / f"inputs-{condition}-{seed}"
        path = args.results / AGREEMENT
        missing = [by for by in DIVISIONS if seed not in load_agreements(condition, by, path)]
        if not missing or not (inputs / STAMP).exists():
            continue
        policy, batch = sample_batch(inputs, condition, seed)
        tokens = policy.tokens(batch)
        for by in missing:
            found = gradient_agreement.analyze(policy, batch, tokens, by, seed)
            if found is None:
                raise RuntimeError(f"{inputs}: too few puzzles have answers of different reward")
            found["warm_start_sha256"] = sha256(inputs / "model" / "model.safetensors")
            write({"condition": condition, "seed": seed} | _kept(found), path)
            print(f"{condition}-{seed}, by {by}: cosine {found['whole']['cosine']:.2f}", flush=True)


def sample_batch(inputs: Path, condition: str, seed: int) -> tuple[Policy, rollouts.Batch]:
    """Return a warm start's policy, and one batch of its answers to its training puzzles."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = str(inputs / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (inputs / "train.jsonl").read_text("utf-8").splitlines()[:PROMPTS]
    rows = [json.loads(line) for line in lines]
    texts, prompts = encode(tokenizer, [row["prompt"] for row in rows])
    longest = runs.CONDITIONS[condition].max_new_tokens
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(rows), runs.SAMPLES_PER_PROMPT, longest, generator=generator)
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = sample(sampler, prompts, uniform, stop=tokenizer.eos_token_id, temperature=runs.TEMPERATURE)
    sampled = [
        rollouts.Sampled(text, prompt, [(tokenizer.decode(answer), answer) for answer in of_prompt])
        for text, prompt, of_prompt in zip(texts, prompts, answers, strict=True)
    ]
    batch = rollouts.make_batch(rollouts.grade(rows, sampled))
    return Policy(model, runs.TEMPERATURE, _MICRO_BATCH_TOKENS, "adamw"), batch


def _kept(value: Any) -> Any:
    """Return a result with its numbers to four digits."""
    if isinstance(value, dict):
        return {name: _kept(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_kept(inner) for inner in value]
    return rounded(value) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
