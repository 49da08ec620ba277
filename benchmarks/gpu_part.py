"""One part of `gpu_check.py`, in a process of its own: `gpu_part.py '{"kind": ...}' result.json`.

A process of its own gives the part the whole memory. Whatever happens to it, the other parts still run.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from arlopti_openrlhf import cpu

cpu.enable()

import gpu_arithmetic  # noqa: E402
from gpu_exactness import compare, left_out  # noqa: E402
from hardware import keep_freed_memory  # noqa: E402
from measurements import floor, summary  # noqa: E402
from rollouts import make_model  # noqa: E402
from update_bench import VARIANTS, Bench, default_attention  # noqa: E402

RESERVE = 10.0  # seconds, for what follows the rounds


def main() -> None:
    part, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    # DeepSpeed compiles its optimizer with this environment's ninja, activated or not.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    optimizer = choose_optimizer() if part["kind"] != "arithmetic" else None
    sizes = dict(mini_batches=1, prompt_length=None, response_length=None, gradient_checkpointing=False)
    args = argparse.Namespace(**sizes | part["args"])
    try:
        if part["kind"] == "arithmetic":
            found: dict = {"rows": gpu_arithmetic.compare()}
        elif part["kind"] == "exactness":
            found = {"rows": compare(args), "left_out": left_out()}
        else:
            found = measure(args, part)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": getattr(error, "variant", "all")}
    result.write_text(json.dumps(found | {"optimizer": optimizer}), encoding="utf-8")


def choose_optimizer() -> str:
    """Name the optimizer: DeepSpeed's, or PyTorch's where there is no compiler for DeepSpeed's."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    if torch.cuda.is_available():
        # Images of CUDA name architectures that DeepSpeed does not know, as 9.0a.
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())

    from openrlhf.utils.deepspeed import DeepspeedStrategy

    try:
        FusedAdamBuilder().load()
        return "DeepSpeed's FusedAdam"
    except Exception as error:  # whichever way compilers and their absence fail
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    upstream = DeepspeedStrategy.get_ds_train_config

    def with_torch_adam(self, optim_dict=None, **kwargs):
        if optim_dict is not None:
            optim_dict = optim_dict | {"params": optim_dict["params"] | {"torch_adam": True}}
        return upstream(self, optim_dict, **kwargs)

    DeepspeedStrategy.get_ds_train_config = with_torch_adam
    return f"torch.optim.AdamW, as DeepSpeed's does not build here: {reason[0]}"


def measure(args: argparse.Namespace, part: dict) -> dict:
    """Return time and memory of each variant, in as many rounds as fit before the end of the part."""
    keep_freed_memory(False)
    # On Hopper PyTorch prefers cuDNN's attention, which makes a new plan for each length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    attention = getattr(args, "attention", default_attention())
    model = make_model(args.shape, attention, liger=args.liger)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    bench = Bench(args, model, also=())
    variants = [variant for variant in VARIANTS if variant not in part["without"]]
    floor_gib = floor(bench)
    memory = {variant: step(variant, bench.peak) for variant in variants}
    keep_freed_memory(True)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    round_took = 0.0
    for _ in range(args.rounds):
        start = time.time()
        if round_took and start + round_took + RESERVE > part["end"]:
            break
        for variant in variants:
            seconds[variant].append(step(variant, bench.step))
        round_took = time.time() - start
    found = summary(bench, seconds, memory)
    return dict(
        description=bench.describe() + (", Liger's kernels" if args.liger else ""),
        attention=attention,
        tokens=bench.tokens,
        floor_gib=floor_gib,
        profile=profiled(bench, found["AR + Lopti"]["seconds"]) if "AR + Lopti" in found else None,
        rounds=max(map(len, seconds.values()), default=0),
        variants={variant: found.get(variant) for variant in VARIANTS},
    )


def profiled(bench: Bench, seconds: float) -> dict:
    """Return what a GPU does in one update of AR + Lopti: its busy share, its longest gap, and its top kernels.

    On a CPU there are the top operations alone.

    Args:
        bench: whose update it is.
        seconds: that it takes without the profiler, which slows the host. The busy share is of these.
    """
    with torch.profiler.profile() as profile:
        bench.step("AR + Lopti")
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy, gap, end = 0.0, 0.0, None
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in on_gpu):
        gap = max(gap, start - end) if end is not None else 0.0
        busy += max(0.0, stop - max(start, end if end is not None else start))
        end = max(stop, end or stop)
    of_what = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    top = sorted(profile.key_averages(), key=lambda event: getattr(event, of_what), reverse=True)[:8]
    return dict(
        kernels=len(on_gpu),
        busy_share=busy / 1e6 / seconds if on_gpu else None,
        longest_gap_ms=gap / 1e3 if on_gpu else None,
        top=[dict(name=event.key, ms=getattr(event, of_what) / 1e3, calls=event.count) for event in top],
    )


def step(variant: str, function) -> float:
    """Call `function(variant)`, and let an error for want of memory carry the variant's name."""
    try:
        return function(variant)
    except torch.OutOfMemoryError as error:
        error.variant = variant
        raise


if __name__ == "__main__":
    main()
