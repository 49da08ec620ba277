"""Refuses what a policy on a machine without CUDA cannot do, before the first rollout."""

from typing import Any

from arlopti_openrlhf import cpu
from arlopti_openrlhf.patching import Upstream


class PolicyActor(Upstream):
    """`PolicyModelActor` that checks the machine it is on. The pre-flight knows the driver's only."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None) -> None:
        check(strategy.args, syncs=bool(vllm_engines))
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)


def check(args: Any, syncs: bool) -> None:
    """Refuse flags that this machine cannot serve if it has no CUDA.

    Args:
        args: upstream's nested arguments.
        syncs: whether the weights go to vLLM engines.

    Raises:
        ValueError: the weights' way to vLLM, the attention's backward pass or Liger's kernels need a GPU.
    """
    if not cpu.uses_cpu():
        return
    backend, where = args.vllm.sync_backend, "the policy is on a machine without a CUDA device, where"
    if syncs and backend != "gloo":
        raise ValueError(f"--vllm.sync_backend {backend}: {where} weights travel by gloo; give gloo")
    if args.ds.attn_implementation == "flex_attention":
        problem = f"{where} PyTorch's FlexAttention has no backward pass"
        raise ValueError(f"--ds.attn_implementation flex_attention: {problem}; give sdpa")
    if args.ds.use_liger_kernel:
        raise ValueError(f"--ds.use_liger_kernel: {where} Liger's kernels do not run; leave it out")
