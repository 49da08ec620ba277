"""Lets a run's controllers say how far they are. The driver, which shows it, reads it in Ray's key-value store."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ray._private import worker
from ray.experimental import internal_kv


class Prompts(NamedTuple):
    """Counts the prompts of a run, over all episodes."""

    total: int  # that it will draw
    at_start: int  # that it had drawn when this process began


class Evaluation(NamedTuple):
    """Holds an evaluation's metrics, under the names of `run.evaluation.compute_eval_metrics`."""

    step: int
    metrics: dict[str, float]


class Step(NamedTuple):
    """Holds what is shown of a step.

    Attributes:
        number: the global step, from 1.
        prompts: that the run has drawn by its end, of all episodes.
        figures: what the console shows.
    """

    number: int
    prompts: int
    figures: str


class Progress(NamedTuple):
    """Holds what a run has said of itself. What it has not said yet is None."""

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
    _put("first", found, overwrite=False)
    _put("last", found)


def read() -> Progress:
    """Return what this process's job has said. Ray has to be connected."""
    kinds = {"prompts": Prompts, "step": Step, "first": Evaluation, "last": Evaluation}
    prefix = _prefix()
    found = {name: internal_kv._internal_kv_get(prefix + name) for name in kinds}
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


def _put(name: str, value: Any, overwrite: bool = True) -> None:
    # What is only shown stops no training. Where Ray's store is gone, the watch ends the run.
    with suppress(Exception):
        internal_kv._internal_kv_put(_prefix() + name, json.dumps(value), overwrite=overwrite)


def _prefix() -> str:
    # Not `ray.get_runtime_context()`, which would start a cluster where the run's has just been left.
    return f"arlopti_openrlhf/{worker.global_worker.current_job_id.hex()}/progress/"
