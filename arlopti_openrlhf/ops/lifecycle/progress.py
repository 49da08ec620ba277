"""Lets a run's controllers report how far they are. The driver reads it in Ray's key-value store, for its parent.

At the end it says what came out of the run.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from arlopti_openrlhf import terminal

RUN_FILE = "run.json"  # in --ckpt.path: the run's name and its id with wandb
_ACCURACY = re.compile(r"(?:(.+)/)?accuracy")
_REWARD = re.compile(r"eval_(.+)_pass1")  # upstream's: the mean reward of a source


class Prompts(NamedTuple):
    """The number of prompts of a run, over all episodes."""

    total: int
    at_start: int  # drawn before this process began


class Step(NamedTuple):
    """A step that is done."""

    number: int  # the global step, from 1
    prompts: int  # drawn by the run so far, over all episodes
    figures: str  # what the console shows


class Evaluation(NamedTuple):
    """An evaluation's metrics, under the names of `ops.rollouts.samples.compute_eval_metrics`."""

    step: int
    metrics: dict[str, float]


class Phase(NamedTuple):
    """What a controller does."""

    name: str
    samples: int = 0  # finished since it began


class Progress(NamedTuple):
    """What a run has reported so far. The rest is None."""

    prompts: Prompts | None = None
    step: Step | None = None  # the last one
    first: Evaluation | None = None  # of this process
    last: Evaluation | None = None
    phase: Phase | None = None  # the present one


def say(name: str, value: Phase | Prompts | Step | Evaluation) -> None:
    """Report one of the fields of `Progress`."""
    from arlopti_openrlhf.ops.lifecycle import stopping  # imports Ray, which the parent of a run does without

    try:
        if name != "first" or not stopping.get("progress/first"):
            stopping.put(f"progress/{name}", json.dumps(value))
    except Exception as error:  # what is only shown stops no training
        terminal.say(f"progress is not shown: {type(error).__name__}: {error}")


def read() -> dict[str, Any]:
    """Return what this process's job has reported, as JSON has it; nothing without Ray."""
    from arlopti_openrlhf.ops.lifecycle import stopping

    found = {name: stopping.get(f"progress/{name}") for name in Progress._fields}
    return {name: json.loads(value) for name, value in found.items() if value}


def brief(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `read` has found, of an evaluation the accuracy alone: a hundred sources fit into no report."""
    shown = dict(found)
    for name in found.keys() & {"first", "last"}:
        step, metrics = found[name]
        shown[name] = step, {key: metrics[key] for key in metrics.keys() & {"accuracy"}}
    return shown


def of(found: Mapping[str, Any]) -> Progress:
    """Return what `read` has found as a record."""
    kinds: dict[str, Any] = {"phase": Phase, "prompts": Prompts, "step": Step, "first": Evaluation, "last": Evaluation}
    return Progress(**{name: kinds[name](*value) for name, value in found.items()})


def place(found: Progress) -> str:
    """Return where a run stands."""
    step = f"after step {found.step.number}" if found.step else "before the first step's end"
    if found.phase is None:
        return "the start"
    samples = f", {found.phase.samples} samples finished" if found.phase.samples else ""
    return f"{found.phase.name} {step}{samples}"


def figures(status: Mapping[str, Any]) -> str:
    """Return what the console shows of a step's metrics.

    That is the rollouts' mean reward and mean score, which is their accuracy where scores are 0 or 1; the gradient
    norm of each of the update's passes; and response tokens per second of the whole step.
    """
    shown = [f"reward {status['rollout/reward_mean']:.3g}"]
    shown += [f"score {status['score']:.3g}"] if "score" in status else []
    norms = [value for name, value in status.items() if name.endswith("actor_grad_norm")]
    shown += [f"grad {' '.join(f'{norm:.3g}' for norm in norms)}"] if norms else []
    if seconds := status.get("timing/step_total"):
        tokens = status["rollout/num_samples"] * status["rollout/response_length_mean"]
        shown.append(f"{tokens / seconds:.0f} tok/s")
    return ", ".join(shown)


def closing_text(args: SimpleNamespace, found: Progress, log: Path | None) -> str:
    """Return the accuracies before and after, and where the model, the log and the curves are."""
    lines = [f"trained {found.step.number} steps" if found.step else "no step was trained"]
    run = args.logger.wandb.run_name
    if args.ckpt.load_enable and (kept := kept_run(Path(args.ckpt.path))):
        run = kept["run_name"]  # a resumed run has the name that it had before
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
    return "\n".join(lines)


def kept_run(path: Path) -> dict[str, str] | None:
    """Return the name and wandb's id that a run has kept in `RUN_FILE`, or None where there is none that is whole."""
    try:
        kept = json.loads((path / RUN_FILE).read_text("utf-8"))
        return {name: str(kept[name]) for name in ("run_name", "wandb_id")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it is missing or torn
        return None


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
    rows = [(terminal.one_line(source), name) for source, name in rows]
    cells = [head, *([source, *(_cell(evaluation, name) for evaluation in shown)] for source, name in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(evaluation: Evaluation, name: str) -> str:
    value, low, high = (evaluation.metrics.get(key) for key in (name, f"{name}/low", f"{name}/high"))
    if value is None:
        return "missing"
    return f"{value:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else "")
