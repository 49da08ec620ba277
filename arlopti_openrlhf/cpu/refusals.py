"""Refuses what a policy on a machine without CUDA cannot do, before the first rollout."""

from collections.abc import Iterator
from typing import Any

from arlopti_openrlhf import cpu
from arlopti_openrlhf.patching import Upstream


class CpuPolicyActor(Upstream):
    """`PolicyModelActor` that checks the machine it is on. The pre-flight knows the driver's only."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None) -> None:
        check(strategy.args, syncs=bool(vllm_engines))
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)


def check(args: Any, syncs: bool) -> None:
    """Raise a ValueError with the first of `problems`."""
    for flag, value, problem, remedy in problems(args, syncs):
        raise ValueError(f"--{flag} {value}: {problem}; {remedy}")


def problems(args: Any, syncs: bool) -> Iterator[tuple[str, object, str, str]]:
    """Yield flag, value, problem and remedy for each flag that this machine cannot serve if it has no CUDA.

    The weights' way to vLLM, the attention's backward pass or Liger's kernels need a GPU.

    Args:
        args: upstream's nested arguments.
        syncs: whether the weights go to vLLM engines.
    """
    if not cpu.uses_cpu():
        return
    backend, where = args.vllm.sync_backend, "the policy is on a machine without a CUDA device, where"
    if syncs and backend != "gloo":
        yield "vllm.sync_backend", backend, f"{where} weights travel by gloo", "give gloo"
    if args.ds.attn_implementation == "flex_attention":
        problem = f"{where} PyTorch's FlexAttention has no backward pass"
        yield "ds.attn_implementation", "flex_attention", problem, "give sdpa"
    if args.ds.use_liger_kernel:
        yield "ds.use_liger_kernel", True, f"{where} Liger's kernels do not run", "leave it out"
