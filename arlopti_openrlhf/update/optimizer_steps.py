"""Controls when DeepSpeed takes an optimizer step, and how to skip an empty one."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import deepspeed
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.logging_utils import init_logger
from torch.optim.lr_scheduler import LRScheduler

from arlopti_openrlhf import learning_rate
from arlopti_openrlhf.update.ranks import Ranks

logger = init_logger(__name__)
Item = TypeVar("Item")


def share_among_passes(trainer: ActorPPOTrainer, passes: int) -> None:
    """Let several passes share what counts optimizer steps, so that at equal data it is that of one pass.

    That is the learning rate's schedule, EMA's decay and the coefficient of the experts' balancing loss.
    """
    learning_rate.stretch(trainer.actor_scheduler, passes)
    trainer.ema_beta **= 1 / passes
    trainer.args = copy.deepcopy(trainer.args)
    trainer.args.actor.aux_loss_coef /= passes


def whole_mini_batches(items: Sequence[Item], size: int, ranks: Ranks) -> list[Item]:
    """Return the first items that fill mini-batches of this rank, as many on every rank. A collective call.

    Upstream would carry the gradients of a short last one over into the next update, here into the next pass. The log
    says how many items are left out.
    """
    count = ranks.min(len(items) // size) * size
    if left_out := len(items) - count:
        logger.info(f"{left_out} samples do not fill a mini-batch of {size}: left out")
    return list(items[:count])


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what clipping multiplies a gradient by, min(1, max_norm / norm). With `max_norm` 0 nothing is clipped."""
    return min(1.0, max_norm / norm) if norm and max_norm else 1.0


def taken(engine: deepspeed.DeepSpeedEngine) -> int:
    """Return how many optimizer steps have moved θ. `global_steps` counts refused ones, too."""
    return engine.global_steps - engine.skipped_steps


def count(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let DeepSpeed count micro-batches by itself again, from the end of a mini-batch on."""
    engine.set_gradient_accumulation_boundary(None)
    engine.micro_steps += engine.gradient_accumulation_steps() - 1  # it has counted one


def skip(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """End a mini-batch whose gradient is zero on every rank without an optimizer step.

    A step would move the weights by the momentum of earlier ones. The engine counts the micro-batch, and the schedule,
    which counts data, moves on. The engine drops its gradients, so what watches their losses forgets these.
    """
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.set_gradient_accumulation_boundary(None)
    engine.optimizer.zero_grad()
    engine.zero_grad()
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.micro_step_id = INITIAL_MICRO_STEP_ID  # as `step` would; ZeRO-3's `zero_grad` does
    pass_over(engine, scheduler)


def pass_over(engine: deepspeed.DeepSpeedEngine, scheduler: LRScheduler) -> None:
    """Move the schedule on where there is no optimizer step to take. An earlier step's refusal counts no more."""
    engine.optimizer.overflow = False
    scheduler.step()
