"""Tells when DeepSpeed steps and by what upstream's loop divides, skips a step, and keeps the schedule of the rate."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.loss_utils import get_loss_batch_info
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from arlopti_openrlhf.update.passes import Place

_COSINES = ("cosine", "cosine_with_restarts")
_COSINES_WITH_MINIMUM = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


def ends_mini_batch(engine: deepspeed.DeepSpeedEngine, buffer: NaiveReplayBuffer, step: int) -> bool:
    """Return whether micro-batch `step` is the last of its mini-batch."""
    return (
        bool(buffer.dynamic_optimizer_step[step])
        if buffer.dynamic_batch
        else engine.is_gradient_accumulation_boundary()
    )


def upstreams_place(engine: deepspeed.DeepSpeedEngine, buffer: NaiveReplayBuffer, step: int) -> Place:
    """Return where micro-batch `step` of upstream's loop stands. DeepSpeed and EMA count all but dynamic ones."""
    ends = ends_mini_batch(engine, buffer, step)
    return Place(ends, buffer.dynamic_sample_loss_scale[step], ends) if buffer.dynamic_batch else Place(ends, 1, 1)


def upstreams_denominators(
    strategy: DeepspeedStrategy, buffer: NaiveReplayBuffer, step: int, response: Tensor
) -> dict[str, Tensor]:
    """Return the denominators of micro-batch `step` of upstream's loop, with the response tokens `response` (B, A)."""
    is_dynamic = strategy.args.train.dynamic_batch_enable
    return get_loss_batch_info(strategy, response, replay_buffer=buffer, step=step, dynamic_batch=is_dynamic)


def announce(engine: deepspeed.DeepSpeedEngine, place: Place) -> None:
    """Tell DeepSpeed, before a micro-batch's backward, whether its mini-batch ends with it.

    Left alone, DeepSpeed takes each `gradient_accumulation_steps` micro-batches for a mini-batch. For dynamic batches
    OpenRLHF sets that to 1, and ZeRO-2 then keeps the gradient of the last micro-batch alone.
    """
    engine.set_gradient_accumulation_boundary(place.ends_mini_batch)


def count(engine: deepspeed.DeepSpeedEngine, place: Place) -> None:
    """Let DeepSpeed count micro-batches by itself again, from the end of a mini-batch on."""
    engine.set_gradient_accumulation_boundary(None)
    engine.micro_steps += place.counts - 1  # it has counted one


def skip(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """End a mini-batch whose gradient is zero on every rank without an optimizer step.

    A step would move the weights by the momentum of earlier ones. The engine counts the micro-batch, and the schedule,
    which counts data, moves on.
    """
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.optimizer.zero_grad()
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.micro_step_id = INITIAL_MICRO_STEP_ID  # as `step` would; ZeRO-3's `zero_grad` does
    pass_over(engine, scheduler)


def pass_over(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """Move the schedule on where there is no optimizer step to take. An earlier step's refusal counts no more."""
    engine.optimizer.overflow = False
    scheduler.step()


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
    # A plain function, as `_stretched`, whose curve this is.
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
    """Span a schedule over `stages` times the steps, so that at equal data the learning rate is equal.

    A schedule that was stretched before is stretched anew.

    Raises:
        ValueError: the learning rate does not follow from the number of steps, and there are several stages.
    """
    if isinstance(scheduler, LambdaLR):
        curves = [inspect.unwrap(curve) for curve in scheduler.lr_lambdas]
        scheduler.lr_lambdas = [_stretched(curve, stages) for curve in curves] if stages > 1 else curves
        follow(scheduler)
    elif stages > 1:
        raise ValueError(f"--actor.lr_scheduler: {type(scheduler).__name__} cannot span the steps of Lopti's stages")


def _stretched(curve: Callable[[float], float], stages: int) -> Callable[[int], float]:
    # A plain function, because checkpoints would hold the attributes of any other callable.
    def rate(step: int) -> float:
        return curve(step / stages)

    return functools.update_wrapper(rate, curve, assigned=(), updated=())
