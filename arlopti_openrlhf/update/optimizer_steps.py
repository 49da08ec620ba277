"""Controls when DeepSpeed takes an optimizer step, and how to skip an empty one."""

import deepspeed
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch.optim.lr_scheduler import LRScheduler


def count(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let DeepSpeed count micro-batches by itself again, from the end of a mini-batch on."""
    engine.set_gradient_accumulation_boundary(None)
    engine.micro_steps += engine.gradient_accumulation_steps() - 1  # it has counted one


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what clipping multiplies a gradient by, min(1, max_norm / norm). With `max_norm` 0 nothing is clipped."""
    return min(1.0, max_norm / norm) if norm and max_norm else 1.0


def skip(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """End a mini-batch whose gradient is zero on every rank without an optimizer step.

    A step would move the weights by the momentum of earlier ones. The engine counts the micro-batch, and the schedule,
    which counts data, moves on. The engine drops its gradients, so what watches their losses forgets these.
    """
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.optimizer.zero_grad()
    engine.zero_grad()
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.micro_step_id = INITIAL_MICRO_STEP_ID  # as `step` would; ZeRO-3's `zero_grad` does
    pass_over(engine, scheduler)


def pass_over(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """Move the schedule on where there is no optimizer step to take. An earlier step's refusal counts no more."""
    engine.optimizer.overflow = False
    scheduler.step()
