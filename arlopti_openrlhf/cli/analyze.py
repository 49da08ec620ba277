"""The paper's figures for one's own policy, data and runs.

    python -m arlopti_openrlhf.cli.analyze --model CHECKPOINT --data kk_train.jsonl --out analysis --report
    python -m arlopti_openrlhf.cli.analyze --runs GRPO=run1,run2 "AR + Lopti=run3,run4" --out analysis

fig1-fig3 (one update: gradients and changes by probability) and fig5 (words) come from --model, fig6-fig8 (training
curves) from --runs. Each is a picture (fig1.png) and its data (fig1.json). Of several models, or of a folder that
holds several checkpoints, each is asked the same prompts and gets a folder of its own; fig5 shows them together.
"""

import argparse
import gc
import importlib.metadata
import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli.arguments import integer, number

STEP = 0.02  # root mean square change of log π by one update, unless a learning rate is given
LAYER_TOKENS = 300  # of Fig. 2


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not args.model and not args.runs:
        parser.error("give --model, or --runs, or both")
    if bool(args.model) != bool(args.data):
        parser.error("--model and --data go together")
    cpu.enable()
    from arlopti_openrlhf.analysis import curves, report, rollouts

    try:
        models = expand_models(args.model)
        check_models(models.values(), args.layers)
        rows = rollouts.read_rows(args.data, args.prompts, args.seed) if models else []
        labels = [label for label, _ in args.runs]
        if len(set(labels)) < len(labels):
            raise ValueError(f"--runs: a label twice; its seeds are LABEL=DIR,DIR: {', '.join(labels)}")
        logs = {label: [curves.find_log(folder) for folder in folders] for label, folders in args.runs}
    except (OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    summaries, figures, words = {}, {"": {}}, {}
    for name, model in models.items():
        summaries[name], figures[name], words[name] = analyze_model(name, model, rows, args)
        write(figures[name], args.out / name if len(models) > 1 else args.out)
    if words:
        figures[""]["fig5"] = words
    if logs:
        runs = {label: [curves.read_scalars(log) for log in seeds] for label, seeds in logs.items()}
        figures[""] |= curves.curves(runs)
    write(figures[""], args.out)
    write_json(summaries, args.out / "summary.json")
    for name, summary in summaries.items():
        print("\n".join([name, *describe(summary)]))
    if args.report:
        page = report.page(summaries, figures, configuration(args, summaries, time.time() - start))
        (args.out / "report.html").write_text(page, encoding="utf-8")
    print(f"{args.out}: {(time.time() - start) / 60:.1f} minutes" + (", report.html" if args.report else ""))


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m arlopti_openrlhf.cli.analyze",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("policies")
    model.add_argument(
        "--model", nargs="+", default=[], help="Hugging Face directories or names; or a directory of checkpoints"
    )
    model.add_argument("--data", nargs="+", default=[], help="JSONL of prepare_data: prompt, label, datasource")
    model.add_argument("--prompts", type=integer(1), default=64, help="drawn from the data (default 64)")
    model.add_argument("--samples", type=integer(2), default=8, help="responses per prompt (default 8)")
    model.add_argument("--temperature", type=number(0), default=1.0, help="of sampling and update (default 1)")
    model.add_argument("--max-new-tokens", type=integer(1), default=1024, help="per response (default 1024)")
    model.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default 0)")
    update = parser.add_argument_group("the update")
    update.add_argument(
        "--alpha",
        type=number(0, 1, include_high=True),
        nargs="+",
        default=[0.1, 0.3, 0.5],
        help="α of AR (default 0.1 0.3 0.5)",
    )
    update.add_argument(
        "--eta", type=number(0, 1), nargs="+", default=[0.3, 0.5, 0.7], help="η of Lopti (default 0.3 0.5 0.7)"
    )
    update.add_argument(
        "--optimizer",
        choices=("adamw", "sgd"),
        default="adamw",
        help="adamw (default): its step in a running training, with second moments from the batch's mini-batches (its "
        "very first step would only see signs); sgd: along the gradient, where Lopti's two small steps sum to GRPO's",
    )
    update.add_argument(
        "--learning-rate",
        type=number(0),
        help=f"default: at which GRPO's update changes log π by {STEP}, as root mean square over the tokens",
    )
    update.add_argument("--layers", type=int, nargs="+", help="of Fig. 2, from 1 (default: first, middle, last)")
    update.add_argument(
        "--micro-batch-tokens",
        type=integer(1),
        default=4096,
        help="of one pass (default 4096); less takes less memory",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        default=[],
        type=_labelled,
        metavar="LABEL=DIR[,DIR]",
        help="TensorBoard folders of training runs; those of one label are seeds of one setting",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--report", action="store_true", help="also write report.html, one page with all of it")
    return parser


def _labelled(text: str) -> tuple[str, list[str]]:
    label, separator, folders = text.partition("=")
    if not label or not separator or not all(folders.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LABEL=DIR or LABEL=DIR,DIR")
    return label, folders.split(",")


def expand_models(values: Sequence[str]) -> dict[str, str]:
    """{name: model}: a directory without a model of its own stands for the checkpoints in it, in natural order.

    Raises:
        ValueError: a directory holds no model, or two models have one name.
    """
    found: list[tuple[str, str]] = []
    for value in values:
        path = Path(value)
        if not path.is_dir() or (path / "config.json").exists():
            found.append((path.absolute().name, value))
            continue
        inside = [folder.parent for folder in path.glob("*/config.json")]
        if not inside:
            raise ValueError(f"--model {value}: no config.json in the directory, nor in one below it")
        inside.sort(key=lambda p: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", p.name)])
        found += [(folder.name, str(folder)) for folder in inside]
    names = [name for name, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--model: two models have one name: {', '.join(twice)}")
    return dict(found)


def check_models(models: Iterable[str], layers: Sequence[int] | None) -> None:
    """OSError or ValueError where a model's configuration cannot be read, or it has not all of the layers."""
    from transformers import AutoConfig

    for model in models:
        number = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
        wrong = [layer for layer in layers or () if not 1 <= layer <= number]
        if wrong:
            raise ValueError(f"--layers {wrong[0]}: {model} has the layers 1 to {number}")


def analyze_model(name: str, model: str, rows: list, args: argparse.Namespace) -> tuple[dict, dict, dict]:
    """What one model's responses to the rows show: its summary, the data of fig1-fig3, and that of fig5."""
    import torch

    from arlopti_openrlhf.analysis import figures, rollouts, suggest, updates, words

    print(f"{name}: {len(rows)} prompts, {args.samples} responses each", flush=True)
    sampled = rollouts.sample(model, rows, args.samples, args.temperature, args.max_new_tokens, args.seed)
    graded = rollouts.grade(rows, sampled)
    batch = rollouts.make_batch(graded)
    policy = updates.Policy(model, args.temperature, args.micro_batch_tokens, args.optimizer)
    tokens = policy.tokens(batch)
    summary: dict[str, Any] = {
        "responses": len(graded),
        "reward": sum(g.reward for g in graded) / len(graded),
        "accuracy": sum(g.score for g in graded) / len(graded),
        "length": sum(len(g.response_ids) for g in graded) / len(graded),
        "entropy": tokens.entropy[batch.action_mask].mean().item(),
        "low_tokens": None,
        "low_gradient": None,
        "learning_rate": args.learning_rate,
        "parameters": sum(p.numel() for p in policy.parameters),
        "suggestion": None,
        "notices": [],
    }
    data = {"fig2": figures.figure_2(policy, batch, tokens, LAYER_TOKENS, args.layers)}
    if not batch.advantages.any():
        summary["notices"].append(
            f"All {args.samples} responses to each prompt earned the same reward: no token has an advantage, so there "
            "is no update to analyse (Fig. 1, Fig. 3). More prompts, or easier or harder ones, may help."
        )
    else:
        summary["suggestion"] = suggest.suggest(batch, tokens)
        summary |= {key: summary["suggestion"][key] for key in ("low_tokens", "low_gradient")}
        moments = policy.zeros()
        gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
        rate = args.learning_rate or policy.learning_rate_of(batch, tokens.log_probs, gradient, moments, STEP)
        summary["learning_rate"] = rate
        del gradient
        data["fig1"] = figures.figure_1(policy, batch, tokens, rate, moments)
        del moments
        data["fig3"] = figures.figure_3(policy, batch, tokens, rate, args.alpha, args.eta)
        summary["notices"] += empty_bins(data)
    # The next model is sampled by an engine that wants the GPU's memory.
    del policy
    gc.collect()
    torch.cuda.empty_cache()
    found = words.analyze([g.text for g in graded], [g.reward for g in graded], [g.prompt for g in graded])
    if not any(result["per_1000_words"] for result in found.values()):
        summary["notices"].append("None of the words of Fig. 5 occurs in the responses.")
    return summary, dict(sorted(data.items())), found


def empty_bins(data: dict) -> list[str]:
    """What Fig. 1 and Fig. 3 cannot show for want of tokens, in words."""
    empty = [group["name"] for group in data["fig1"]["groups"] if not group["tokens"]]
    notices = [f"No token has a probability in: {', '.join(empty)}."] if empty else []
    pairs = zip(data["fig3"]["bins"], data["fig3"]["positive_tokens"], strict=True)
    few = [f"{name} ({number})" for name, number in pairs if number < 30]
    if few:
        notices.append(f"Fig. 3 has few positive tokens in: {', '.join(few)}. More prompts or samples would help.")
    return notices


def describe(summary: dict) -> list[str]:
    """A model's summary for the terminal."""
    lines = [
        f"  mean reward {summary['reward']:.3f}, accuracy {summary['accuracy']:.3f}, "
        f"{summary['length']:.0f} tokens per response, entropy {summary['entropy']:.3f} nats"
    ]
    found = summary["suggestion"]
    if found:
        lines.append(
            f"  tokens with probability < 0.5: {found['low_tokens']:.1%}, {found['low_gradient']:.1%} of the gradient"
        )
        values = [(n, found[k]) for n, k in (("α", "alpha"), ("η", "eta")) if found[k]["value"] is not None]
        lines.append(
            "  to start from: "
            + ", ".join(f"{n} ≈ {v['value']:.2f} ({v['low']:.2f}-{v['high']:.2f})" for n, v in values)
        )
    return lines + [f"  {notice}" for notice in summary["notices"]]


def write(figures: dict[str, Any], folder: Path) -> None:
    """Each figure's picture and data."""
    from arlopti_openrlhf.analysis import plots

    folder.mkdir(parents=True, exist_ok=True)
    for name, data in figures.items():
        (folder / f"{name}.png").write_bytes(plots.png(name, data))
        write_json(data, folder / f"{name}.json")


def write_json(data: Any, path: Path) -> None:
    """ValueError where a number is not finite: JSON has none such."""
    path.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def configuration(args: argparse.Namespace, summaries: dict[str, dict], seconds: float) -> dict[str, str]:
    """What was run, for the report."""
    shown = {}
    for flag, value in vars(args).items():
        if flag == "runs":
            value = [f"{label}={','.join(folders)}" for label, folders in value]
        if value not in (None, []):
            shown["--" + flag.replace("_", "-")] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    for name, summary in summaries.items():
        shown[f"{name}: parameters"] = f"{summary['parameters']:,}"
        if summary["learning_rate"]:
            shown[f"{name}: learning rate"] = f"{summary['learning_rate']:.3g}"
    for package in ("torch", "transformers", "vllm", "openrlhf"):
        shown[package] = _version(package)
    return shown | {"device": "CPU" if cpu.uses_cpu() else "GPU", "minutes": f"{seconds / 60:.1f}"}


def _version(package: str) -> str:
    # vLLM's CPU build is a distribution of another name.
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main()
