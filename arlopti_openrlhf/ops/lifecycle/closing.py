"""Says at the end of a run what came out of it, and what to do next."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.health.trackers import RUN_FILE
from arlopti_openrlhf.ops.lifecycle.progress import Evaluation, Progress

_ACCURACY = re.compile(r"(?:(.+)/)?accuracy")
_REWARD = re.compile(r"eval_(.+)_pass1")  # upstream's: the mean reward of a source


def text(args: SimpleNamespace, found: Progress, log: Path | None) -> str:
    """Return the accuracies before and after, where the model, the log and the curves are, and the next command."""
    lines = [f"trained {found.step.number} steps" if found.step else "no step was trained"]
    kept, run = Path(args.ckpt.path, RUN_FILE), args.logger.wandb.run_name
    if args.ckpt.load_enable and kept.exists():  # a resumed run has the name that it had before
        run = json.loads(kept.read_text("utf-8"))["run_name"]
    if found.first and found.last:
        lines += _table(found.first, found.last)
    elif args.eval.dataset:
        lines.append("not evaluated (--eval.steps)")
    lines.append(f"model:   {args.ckpt.output_dir}")
    lines += [f"log:     {log}"] if log else []
    if args.logger.tensorboard_dir:
        folder = str(Path(args.logger.tensorboard_dir, run))
        lines.append(f"curves:  {shlex.join(['tensorboard', '--logdir', folder])}")
    if args.logger.wandb.key:
        lines.append(f"curves:  wandb, project {args.logger.wandb.project}, run {run}")
    data = (args.eval.dataset or "").split(",")
    # `evaluate` takes whole models, and files as `prepare_data` writes them.
    if not args.ds.lora.rank and all(Path(path).suffix in (".jsonl", ".parquet") for path in data):
        command = ["arlopti", "evaluate", "--model", args.ckpt.output_dir, "--data", *data]
        lines.append(f"next:    {shlex.join(command)} --out OUT")
    return "\n".join(lines)


def _table(first: Evaluation, last: Evaluation) -> list[str]:
    """Return the table's lines: one for each source, with 95% intervals."""
    sources = [match[1] for name in last.metrics if (match := _ACCURACY.fullmatch(name)) and match[1]]
    rows = [(source, f"{source}/accuracy") for source in sources]
    if len(rows) > 1:
        rows.append(("mean", "accuracy"))
    rows += [
        (f"{match[1]}, reward", name)
        for name in last.metrics
        if (match := _REWARD.fullmatch(name)) and match[1] not in sources
    ]
    shown = [first] if first.step == last.step else [first, last]
    head = ["held-out accuracy", *(f"step {evaluation.step}" for evaluation in shown)]
    cells = [head, *([source, *(_cell(evaluation, name) for evaluation in shown)] for source, name in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(evaluation: Evaluation, name: str) -> str:
    value, low, high = (evaluation.metrics.get(key) for key in (name, f"{name}/low", f"{name}/high"))
    if value is None:
        return "missing"
    return f"{value:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else "")
