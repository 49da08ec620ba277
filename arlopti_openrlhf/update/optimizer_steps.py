"""Optimizer steps: when DeepSpeed takes one, how one is skipped, and what the learning rate makes of twice as many."""

from collections.abc import Callable

import deepspeed
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from torch.optim.lr_scheduler import LambdaLR


def ends_mini_batch(engine: deepspeed.DeepSpeedEngine, buffer: NaiveReplayBuffer, step: int) -> bool:
    """Return whether the optimizer steps after micro-batch `step`: where dynamic batches or the engine say so."""
    return (
        bool(buffer.dynamic_optimizer_step[step])
        if buffer.dynamic_batch
        else engine.is_gradient_accumulation_boundary()
    )


def skip(engine: deepspeed.DeepSpeedEngine, scheduler: LambdaLR) -> None:
    """End a mini-batch whose gradient is zero on every rank without an optimizer step.

    A step would move the weights by the momentum of earlier ones. The engine counts the micro-batch, and the schedule,
    which counts data, moves on.
    """
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.set_gradient_accumulation_boundary(None)  # the engine counts micro-batches again
    engine.optimizer.zero_grad()
    scheduler.step()


class StretchedCurve:
    """A learning-rate curve over `stages` times the steps: at equal data the learning rate is the same."""

    def __init__(self, curve: Callable[[float], float], stages: int) -> None:
        self.curve, self.stages = curve, stages

    def __call__(self, step: int) -> float:
        return self.curve(step / self.stages)


def stretch(scheduler: LambdaLR, stages: int) -> None:
    """Span a schedule over `stages` times the steps. A schedule that was stretched before is stretched anew."""
    curves = [curve.curve if isinstance(curve, StretchedCurve) else curve for curve in scheduler.lr_lambdas]
    scheduler.lr_lambdas = [StretchedCurve(curve, stages) for curve in curves] if stages > 1 else curves
