"""Keeps the learning rate on its schedule: at its minimum past its end, after a resume, over more steps."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_COSINES = ("cosine", "cosine_with_restarts")
_COSINES_WITH_MINIMUM = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


def stay_at_minimum(scheduler: LRScheduler, optimization: Mapping[str, Any]) -> None:
    """Keep a schedule at its minimum from its end on. A cosine would come up again. Others stay down by themselves.

    A run is past the end where it has done more steps than its plan has, as one that is resumed with fewer episodes.

    Args:
        scheduler: a fresh one.
        optimization: what upstream made it of.
    """
    at_end = dict.fromkeys(_COSINES, 0.0) | dict.fromkeys(_COSINES_WITH_MINIMUM, optimization["min_lr_ratio"])
    minimum = at_end.get(optimization["lr_scheduler"])
    if minimum is not None:
        steps = optimization["scheduler_steps"]
        scheduler.lr_lambdas = [_ending(curve, steps, minimum) for curve in scheduler.lr_lambdas]


def _ending(curve: Callable[[float], float], steps: int, minimum: float) -> Callable[[float], float]:
    # A plain function for the same reason as in `_stretched`, which takes this as its curve.
    def rate(step: float) -> float:
        return curve(step) if step < steps else minimum

    return rate


def follow(scheduler: LRScheduler) -> None:
    """Take the learning rate from the schedule as it is now. A checkpoint has the one of the plan that it is from."""
    if isinstance(scheduler, LambdaLR):
        shares = [curve(scheduler.last_epoch) for curve in scheduler.lr_lambdas]
        scheduler._last_lr = [base * share for base, share in zip(scheduler.base_lrs, shares, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate


def stretch(scheduler: LRScheduler, stages: int) -> None:
    """Span a schedule over `stages` times the steps, so the learning rate is equal at equal data.

    A schedule that was stretched before is stretched from its own curve again.

    Raises:
        ValueError: the learning rate does not follow from the number of steps, and there are several stages.
    """
    if isinstance(scheduler, LambdaLR):
        curves = [inspect.unwrap(curve) for curve in scheduler.lr_lambdas]
        scheduler.lr_lambdas = [_stretched(curve, stages) for curve in curves] if stages > 1 else curves
        follow(scheduler)
    elif stages > 1:
        raise ValueError(f"--actor.lr_scheduler: {type(scheduler).__name__} cannot span the steps of several passes")


def _stretched(curve: Callable[[float], float], stages: int) -> Callable[[int], float]:
    # A plain function, because checkpoints would hold the attributes of any other callable.
    def rate(step: int) -> float:
        return curve(step / stages)

    return functools.update_wrapper(rate, curve, assigned=(), updated=())
