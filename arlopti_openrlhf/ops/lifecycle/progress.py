"""Lets a run's controllers say how far they are. The driver, which shows it, reads it in Ray's key-value store."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from arlopti_openrlhf.ops.lifecycle import stopping


class Prompts(NamedTuple):
    """Counts the prompts of a run, over all episodes."""

    total: int  # that it will draw
    at_start: int  # that it had drawn when this process began


class Evaluation(NamedTuple):
    """An evaluation's metrics, under the names of `ops.rollouts.evaluation.compute_eval_metrics`."""

    step: int
    metrics: dict[str, float]


class Step(NamedTuple):
    """What is shown of a step.

    Attributes:
        number: the global step, from 1.
        prompts: that the run has drawn by its end, of all episodes.
        figures: what the console shows.
    """

    number: int
    prompts: int
    figures: str


class Progress(NamedTuple):
    """What a run has reported of itself. What it has not reported yet is None."""

    prompts: Prompts | None = None
    step: Step | None = None  # the last one
    first: Evaluation | None = None  # of this process
    last: Evaluation | None = None


def say_prompts(total: int, at_start: int) -> None:
    """Say how many prompts the run will draw in all episodes, and how many of them it has drawn before."""
    _put("prompts", Prompts(total, at_start))


def say_step(number: int, prompts: int, status: Mapping[str, Any]) -> None:
    """Say that a step is done.

    Args:
        number: the global step.
        prompts: that the run has drawn so far.
        status: the step's metrics.
    """
    _put("step", Step(number, prompts, figures(status)))


def say_evaluation(step: int, metrics: Mapping[str, float]) -> None:
    """Say what an evaluation has found."""
    found = Evaluation(step, dict(metrics))
    _put("first", found, only_once=True)
    _put("last", found)


def read() -> Progress:
    """Return what this process's job has said. Ray has to be connected."""
    kinds = {"prompts": Prompts, "step": Step, "first": Evaluation, "last": Evaluation}
    found = {name: _get(name) for name in kinds}
    return Progress(**{name: kinds[name](*json.loads(value)) for name, value in found.items() if value})


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


def _put(name: str, value: Any, only_once: bool = False) -> None:
    try:
        if not (only_once and _get(name)):
            stopping.put(f"progress/{name}", json.dumps(value))
    except Exception as error:  # what is only shown stops no training
        print(f"arlopti_openrlhf: progress is not shown: {type(error).__name__}: {error}", flush=True)


def _get(name: str) -> bytes | None:
    return stopping.get(f"progress/{name}")
