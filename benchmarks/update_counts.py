"""Operators of a whole update, DeepSpeed's and the optimizer step included, counted without a GPU.

python benchmarks/update_counts.py [--layers 24] [--zero-stage 2] [--micro-batches 1 2]

A small model in bf16 is trained by a real engine of one rank. An operator that makes no view is counted as one, as a
GPU would launch a kernel or more for it. Layers are alike, so that one and two of them show what more take. What
attention and the LM head launch on a GPU is in `gpu_counts`; the rest is the same there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from arlopti_openrlhf import cpu

cpu.enable()

import rollouts  # noqa: E402
from claimed_gpu import _WITHOUT_KERNEL  # noqa: E402
from openrlhf.utils import deepspeed  # noqa: E402
from update_bench import Bench  # noqa: E402

from arlopti_openrlhf.ops.health import guard  # noqa: E402
from arlopti_openrlhf.patching import replaced_attribute  # noqa: E402

PHASES = ("forward and loss", "backward", "optimizer step")
VARIANTS = ("packed stock GRPO", "GRPO", "AR + Lopti")
PARAMETERS = 12  # of a layer of Qwen2


class Operators(TorchDispatchMode):
    """Counts operators that make no view, by the phase that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.found = PHASES[0], Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().split("::")[1].split(".")[0] not in _WITHOUT_KERNEL:
            self.found[self.phase] += 1
        return function(*args, **(kwargs or {}))

    def within(self, phase: str, function):
        """Return the function, whose operators belong to this phase."""

        def counted(*args, **kwargs):
            self.phase = phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = PHASES[0]

        return counted


def of_updates(layers: int, zero_stage: int, micro_batches: int, steps: int) -> dict[str, Counter]:
    """Return the operators of an update of each variant, after one that settles what is settled once.

    Args:
        layers: of the model.
        zero_stage: DeepSpeed's.
        micro_batches: of each optimizer step and pass, with the responses to one prompt in each.
        steps: optimizer steps in each pass.
    """
    rollouts.SHAPES["counted"] = rollouts.Shape("counted", 32, 64, layers, 4, 2, vocab_size=211)
    sizes = argparse.Namespace(shape="counted", prompts=micro_batches, mini_batches=steps, micro_batch_size=8)
    sizes.packing, sizes.scale, sizes.prompt_length, sizes.response_length = False, 0.03, None, None
    with replaced_attribute(deepspeed, "DeepspeedStrategy", guard.GuardedStrategy), _stage(zero_stage):
        bench = Bench(sizes, rollouts.make_model("counted", "sdpa"))
    found = {}
    for variant in VARIANTS:
        bench.step(variant)
        strategy = bench.trainers[variant].strategy
        with Operators() as operators:
            for name, phase in (("backward", PHASES[1]), ("optimizer_step", PHASES[2])):
                setattr(strategy, name, operators.within(phase, getattr(strategy, name)))
            bench.step(variant)
        found[variant] = operators.found
    return found


@contextmanager
def _stage(zero_stage: int):
    """Let the benchmark's engine have this stage of ZeRO while the context lasts."""
    import update_bench

    flags_of = update_bench.training_flags
    with replaced_attribute(
        update_bench, "training_flags", lambda args: flags_of(args, ["--ds.zero_stage", str(zero_stage)])
    ):
        yield


def counted(zero_stage: int, micro_batches: int, steps: int) -> dict[int, dict[str, Counter]]:
    """Return the operators with one and with two layers. Each has a process of its own, as an engine stays."""
    result = {}
    for layers in (1, 2):
        code = f"import update_counts as u, json; print(json.dumps(u.of_updates({layers}, {zero_stage}, "
        code += f"{micro_batches}, {steps})))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        result[layers] = {name: Counter(found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}
    return result


def table(layers: int, zero_stage: int, micro_batches: int, steps: int) -> str:
    """Return Markdown lines, one for each variant."""
    found, lines = counted(zero_stage, micro_batches, steps), []
    for variant in VARIANTS:
        one, two = found[1][variant], found[2][variant]
        columns = [one[phase] + (layers - 1) * (two[phase] - one[phase]) for phase in PHASES]
        slope = (two[PHASES[2]] - one[PHASES[2]]) / PARAMETERS
        cells = [variant, steps, micro_batches, *columns, sum(columns), f"{slope:.1f}"]
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--zero-stage", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    head = ["", "optimizer steps", "micro-batches in each", *PHASES, "in all", "of the steps, per parameter"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for steps in args.steps:
        for micro_batches in args.micro_batches:
            print(table(args.layers, args.zero_stage, micro_batches, steps), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
