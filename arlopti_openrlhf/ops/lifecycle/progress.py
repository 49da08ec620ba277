"""Lets a run's controllers report how far they are. The driver reads it in Ray's key-value store, and shows it."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from arlopti_openrlhf.ops.lifecycle import stopping


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


class Progress(NamedTuple):
    """What a run has reported so far. The rest is None."""

    prompts: Prompts | None = None
    step: Step | None = None  # the last one
    first: Evaluation | None = None  # of this process
    last: Evaluation | None = None


def say(name: str, value: Prompts | Step | Evaluation) -> None:
    """Report one of the fields of `Progress`."""
    try:
        if name != "first" or not stopping.get("progress/first"):
            stopping.put(f"progress/{name}", json.dumps(value))
    except Exception as error:  # what is only shown stops no training
        print(f"arlopti_openrlhf: progress is not shown: {type(error).__name__}: {error}", flush=True)


def read() -> Progress:
    """Return what this process's job has reported. Ray has to be connected."""
    kinds: dict[str, Any] = {"prompts": Prompts, "step": Step, "first": Evaluation, "last": Evaluation}
    found = {name: stopping.get(f"progress/{name}") for name in kinds}
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
