"""Makes DeepSpeed's Adam on the CPU forget its history. `arlopti_openrlhf.cpu.patches` makes the replacements."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def _patch_fused_adam(module: Any) -> None:
    """Let Adam's bias correction follow from the number of the step alone. A resumed run then equals an unbroken one.

    DeepSpeed's C++ op keeps the powers of both betas in float32. It multiplies them by the betas where steps follow
    each other, and computes them from the step's number otherwise, as in the first step after a resume. The results
    differ in the last bits. A step with the number 0, on a tensor of its own, makes it compute them each time.
    """

    def step_0(self, group: dict) -> None:
        one_zero = [[torch.zeros(1)] for _ in range(4)]  # gradient, parameter, and both moments
        numbers = 0.0, *group["betas"], group["eps"], 0, self.adam_w_mode, 0, 0.0
        module.multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, one_zero, *numbers)

    _step_0_first(module.FusedAdam, step_0)


def _patch_cpu_adam(module: Any) -> None:
    """Do for `--ds.adam_offload` what `_patch_fused_adam` does."""

    def step_0(self, group: dict) -> None:
        one_zero = [torch.zeros(1) for _ in range(4)]
        self.ds_opt_adam.adam_update(self.opt_id, 0, 0.0, *group["betas"], group["eps"], 0.0, False, *one_zero)

    _step_0_first(module.DeepSpeedCPUAdam, step_0)


def _step_0_first(optimizer: Any, step_0: Callable) -> None:
    step = optimizer.step

    @functools.wraps(step)
    def without_history(self, *args, **kwargs):
        for group in self.param_groups:
            step_0(self, group)
        return step(self, *args, **kwargs)

    optimizer.step = without_history


PATCHES = {
    "deepspeed.ops.adam.cpu_adam": _patch_cpu_adam,
    "deepspeed.ops.adam.fused_adam": _patch_fused_adam,
}
