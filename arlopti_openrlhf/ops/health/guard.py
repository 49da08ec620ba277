"""Refuses optimizer steps with a loss or gradient that is not finite, on all ranks alike."""

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import has_inf_or_nan
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
from openrlhf.utils.deepspeed.deepspeed_utils import _z3_params_to_fetch
from torch import Tensor
from torch import distributed as dist

from arlopti_openrlhf.patching import Upstream


class GuardedStrategy(DeepspeedStrategy):
    """`DeepspeedStrategy` that refuses an optimizer step if the loss or gradient of any rank is not finite.

    DeepSpeed looks only at gradients, and only under ZeRO-1 and 2 and in fp16. Elsewhere one NaN would make all
    weights and moments NaN. A refused step is not a step: the weights, the optimizer's state, the schedule and EMA
    stay where they are. DeepSpeed counts it in `engine.skipped_steps`. What is finite goes through to the bit, unless
    the norm of a parameter group overflows DeepSpeed's type for it: float32, and float64 under ZeRO-3.

    Muon is the exception: it keeps its momentum before DeepSpeed looks at the gradient, so all later steps are
    refused too.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # Of this rank's micro-batches since the last optimizer step, or since the engine's gradients were dropped.
        self.losses: list[Tensor] = []

    def _ds_init_train_model(self, model, cfg: dict):
        model, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        self._check_steps(engine_of(model))
        return model, optimizer, scheduler

    def _check_steps(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Make DeepSpeed look at the losses and gradients before it steps, whatever the stage and the type."""
        optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
        zero_grad = engine.zero_grad

        def forget() -> None:
            self.losses.clear()
            zero_grad()

        engine.zero_grad = forget
        if stage == 0 and not engine.fp16_enabled():
            optimizer.step = self._checked_step(engine)
            return
        checker = optimizer if stage else optimizer.overflow_checker
        has_overflow = checker.has_overflow
        is_offloaded = stage in (1, 2) and optimizer.cpu_offload
        norms = None if stage == 0 or engine.fp16_enabled() or is_offloaded else GroupNorms(optimizer, stage)

        def is_bad(*args, **kwargs) -> bool:
            if norms is None:
                is_bad_gradient = has_overflow(*args, **kwargs)
                return self._any_is_bad() or is_bad_gradient
            return self._any_is_bad([norm < 0 for norm in norms.find()])

        checker.has_overflow = is_bad
        if stage < 3:
            optimizer.check_grad_overflow = True  # in fp16 it does anyway
        elif norms is not None:
            go_on = optimizer._overflow_check_and_loss_scale_update

            def go_on_and_check(**kwargs) -> bool:
                optimizer.overflow = False  # of the step before
                go_on(**kwargs)
                optimizer.check_overflow()  # last, because newer versions of DeepSpeed begin with no overflow
                if optimizer.overflow and kwargs.get("update_scale", True):
                    optimizer._overflow_clean_up(optimizer.loss_scale)
                return optimizer.overflow

            optimizer._overflow_check_and_loss_scale_update = go_on_and_check

    def _checked_step(self, engine: deepspeed.DeepSpeedEngine) -> Callable:
        """Return the step of an optimizer without a check, with one."""
        optimizer, step = engine.optimizer, engine.optimizer.step

        def check_and_step(*args, **kwargs) -> Any:
            gradients = (parameter.grad for parameter in engine.module.parameters())
            optimizer.overflow = self._any_is_bad([has_inf_or_nan(each) for each in gradients if each is not None])
            return optimizer.zero_grad() if optimizer.overflow else step(*args, **kwargs)

        return check_and_step

    def _any_is_bad(self, bad_gradients: Sequence[Tensor] = ()) -> bool:
        """Return whether a loss or gradient is bad on any rank, and forget the losses. A collective call.

        Args:
            bad_gradients: whether this rank's gradients are, () each.
        """
        bad = sum(bad_gradients, torch.zeros(1, device=torch.cuda.current_device()))
        for loss in self.losses:
            bad += ~loss.isfinite()
        self.losses.clear()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad)

    def backward(self, loss: Tensor, model, _optimizer, **kwargs) -> None:
        # A loss that is NaN may have gradients that are finite: `clamp` in the policy loss turns a NaN into 0.
        self.losses.append(loss.detach())
        super().backward(loss, model, _optimizer, **kwargs)

    def moving_average(self, model, model_ema, beta=0.992, device="cpu") -> None:
        if self.stage != 3 and not is_refused(engine_of(model)):
            return super().moving_average(model, model_ema, beta, device)
        self.time_steps["ema"] += 1  # upstream counts micro-batches, and averages at every so many
        is_due = self.time_steps["ema"] % self.accumulated_gradient == 0 or self.use_dynamic_batch
        if is_due and not is_refused(engine_of(model)):
            self._average_shards(model, model_ema, beta)

    @torch.no_grad()
    def _average_shards(self, model, model_ema, beta: float) -> None:
        """Average the weights under ZeRO-3, where upstream's average is dropped as its weights are divided again."""
        for weights, average in zip(model.parameters(), model_ema.parameters(), strict=True):
            if not weights.requires_grad:
                continue
            away = _z3_params_to_fetch([weights])
            with (
                deepspeed.zero.GatheredParameters(away, enabled=bool(away)),
                deepspeed.zero.GatheredParameters([average], modifier_rank=0),
            ):
                if self.is_rank_0():
                    average.copy_((1 - beta) * weights.to(average.device) + beta * average)

    def get_grad_norm(self, model) -> float:
        """Return the norm of the last step's gradient, NaN if the step was refused. DeepSpeed keeps an older one."""
        return torch.nan if is_refused(engine_of(model)) else super().get_grad_norm(model)


class GroupNorms:
    """The gradient norms of an optimizer's parameter groups, computed once for the check and the clipping after it.

    A group's norm is that of all ranks, and -1 if one of its gradients is not finite. So no gradient is looked at by
    itself, for which DeepSpeed takes 13 operators per parameter.

    Args:
        optimizer: DeepSpeed's, of ZeRO-1 to 3, which gets its norms from here too.
        stage: ZeRO's.
    """

    def __init__(self, optimizer: Any, stage: int) -> None:
        self.optimizer, self.stage, self.compute = optimizer, stage, optimizer.get_grad_norm_direct
        self.found: dict[int, Tensor] = {}  # by the identity of the group's list of parameters
        optimizer.get_grad_norm_direct = self._get

    def find(self) -> list[Tensor]:
        """Return the norm of each group, () each. A collective call."""
        self.found.clear()
        if self.stage == 3:
            return self.optimizer._get_norm_groups()
        groups = range(len(self.optimizer.bit16_groups))
        gradients, parameters = self.optimizer.averaged_gradients, self.optimizer.params_in_partition
        return [self.optimizer.get_grad_norm_direct(gradients[i], parameters[i]) for i in groups]

    def _get(self, gradients: list[Tensor], parameters: list, norm_type: float = 2) -> Tensor:
        key = id(parameters)
        if key not in self.found:
            self.found[key] = self.compute(gradients, parameters, norm_type)
        return self.found[key]


class GuardedPolicyActor(Upstream):
    """`PolicyModelActor` that says which parameter is not finite."""

    def first_non_finite(self) -> str | None:
        return first_non_finite(self.actor.model)


def is_refused(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether the last optimizer step was refused."""
    # An optimizer that is not DeepSpeed's has no such mark before its first step.
    return hasattr(engine.optimizer, "overflow") and engine.optimizer.overflow


def engine_of(model) -> deepspeed.DeepSpeedEngine:
    """Return the engine of an `Actor`, or of a model that is one."""
    return model if isinstance(model, deepspeed.DeepSpeedEngine) else model.model


@torch.no_grad()
def first_non_finite(engine: deepspeed.DeepSpeedEngine) -> str | None:
    """Return the name of the first parameter with a value that is not finite on this rank, or None.

    Under ZeRO-3 a rank looks at its own shards, so the ranks may differ.
    """
    is_sharded = engine.zero_optimization_stage() == 3
    names, found = [], []
    for name, parameter in engine.module.named_parameters():
        for tensor in (parameter.data, parameter.ds_tensor.data) if is_sharded else (parameter.data,):
            if tensor.is_floating_point():
                names.append(name)
                found.append(has_inf_or_nan(tensor).to(engine.device))  # of a moving average, some are on the CPU
    # One wait for the device, not one per parameter.
    return next((name for name, is_bad in zip(names, torch.stack(found).tolist(), strict=True) if is_bad), None)
