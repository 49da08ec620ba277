"""One part of `gpu_check.py`, in a process of its own: `gpu_part.py '{"kind": ...}' result.json`.

A process of its own gives the part the whole memory. Whatever happens to it, the other parts still run.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Before the stand-ins: these look around for what is installed, and have to see it as it is.
import peft  # noqa: F401
import torch
import transformers  # noqa: F401
from missing_packages import stand_ins

from arlopti_openrlhf import cpu

with stand_ins():
    cpu.enable()
    from openrlhf.trainer.ray import ppo_actor  # noqa: F401

    from arlopti_openrlhf.update import trainer  # noqa: F401

from gpu_exactness import compare, left_out  # noqa: E402
from hardware import keep_freed_memory, matrix_product_rate  # noqa: E402
from measurements import summary  # noqa: E402
from rollouts import make_model  # noqa: E402
from update_bench import VARIANTS, Bench, default_attention  # noqa: E402

RESERVE = 10.0  # seconds, for what follows the rounds


def main() -> None:
    part, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    # DeepSpeed compiles its optimizer with this environment's ninja, activated or not.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    optimizer = choose_optimizer()
    args = argparse.Namespace(mini_batches=1, packing=False, prompt_length=None, response_length=None, **part["args"])
    try:
        if part["kind"] == "exactness":
            found = {"rows": compare(args), "left_out": left_out()}
        else:
            found = measure(args, part)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": getattr(error, "variant", "all")}
    result.write_text(json.dumps(found | {"optimizer": optimizer}), encoding="utf-8")


def choose_optimizer() -> str:
    """Name the optimizer: DeepSpeed's, or PyTorch's where there is no compiler for DeepSpeed's."""
    from deepspeed.ops.op_builder import FusedAdamBuilder
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
    """Return time, memory and MFU of each variant, in as many rounds as fit before the end of the part."""
    keep_freed_memory(False)
    attention = getattr(args, "attention", default_attention())
    bench = Bench(args, make_model(args.shape, attention), also=())
    variants = [variant for variant in VARIANTS if variant not in part["without"]]
    bench.step("GRPO", bench.fraction(0.01))  # the first step allocates
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
    rate = matrix_product_rate()
    found = summary(bench, seconds, memory, rate)
    return dict(
        description=bench.describe(),
        attention=attention,
        tokens=bench.tokens,
        matrix_flops_per_s=rate,
        rounds=max(map(len, seconds.values()), default=0),
        variants={variant: found.get(variant) for variant in VARIANTS},
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
