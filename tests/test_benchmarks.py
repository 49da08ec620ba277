"""The benchmark of the update phase, as a user runs it, at a hundredth of its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "update_phase.py"
sys.path.insert(0, str(BENCHMARK.parent))


def run(*arguments):
    result = subprocess.run([sys.executable, BENCHMARK, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.long
def test_update_phase(tmp_path):
    variants = ["stock GRPO", "packed stock GRPO", "GRPO", "AR + Lopti", "AR + Lopti, no statistics"]
    flags = "--shape toy --scale 0.03 --repeats 1 --variants".split() + variants
    printed = run(*flags, "--json", tmp_path / "r.json", "--chart", tmp_path / "chart.png")
    record = json.loads((tmp_path / "r.json").read_text())
    measured = record["variants"]
    assert set(measured) == set(variants) and all(f"| {variant} | " in printed for variant in variants)
    for variant in measured.values():
        assert variant["memory_gib"] >= 0.5 * record["floor_gib"] > 0
        assert variant["tokens_per_s"] == pytest.approx(record["tokens"] / variant["seconds"])
        assert 0 < variant["optimizer_seconds"] < variant["seconds"]
    # They compute the same gradient, but for the rounding of bf16.
    norm = measured["stock GRPO"]["gradient_norm"]
    for variant in ("packed stock GRPO", "GRPO"):
        assert measured[variant]["gradient_norm"] == pytest.approx(norm, rel=0.02), variant
    of_lopti = measured["AR + Lopti"]["gradient_norm"]
    assert of_lopti != pytest.approx(norm, rel=0.02)
    assert of_lopti == measured["AR + Lopti, no statistics"]["gradient_norm"]
    assert measured["stock GRPO"]["time_ratio"] == measured["packed stock GRPO"]["packed_time_ratio"] == 1
    for variant in variants:
        assert measured[variant]["packed_time_ratio"] > 0 < measured[variant]["packed_memory_ratio"]
    assert record["machine"]["products"] in ("float32", "bfloat16")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


COUNT = """
import json, logging, sys
from dataclasses import replace
from types import SimpleNamespace
from torch.utils.flop_counter import FlopCounterMode
from arlopti_openrlhf import cpu
logging.disable(logging.WARNING)
cpu.enable()
from operations import numbered, operations, update_passes
from rollouts import SHAPES, make_model, unpadded
from update_bench import Bench, default_attention

# One micro-batch in each optimizer step: a shuffle then pads to the same length.
steps = int(sys.argv[1])
args = SimpleNamespace(shape="toy", scale=0.06, prompts=2, mini_batches=steps, micro_batch_size=16,
                       prompt_length=None, response_length=None)
bench = Bench(args, make_model("toy", default_attention()))
bench.step("GRPO")  # the self-check's passes are over then
found = {}
for variant, passes in update_passes(numbered(unpadded(bench.rollout)), 16, steps).items():
    if variant in bench.trainers:
        with FlopCounterMode(display=False) as counter:
            bench.step(variant)
        counted = counter.get_flop_counts()["Global"]
        # The counter knows nothing of the attention kernels.
        predicted = sum(operations(SHAPES["toy"], replace(each, pairs=0)) for each in passes)
        found[variant] = [sum(n for name, n in counted.items() if "attention" not in str(name)), predicted]
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_operations_are_those_that_the_updates_execute(steps):
    """What remains are RoPE's angles, the share of the low tokens, which is not exactly 15% here, and the prompts of
    the first of two steps, which a shuffle chooses."""
    command = [sys.executable, "-c", COUNT, str(steps)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARK.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found) == {"stock GRPO", "packed stock GRPO", "GRPO", "AR + Lopti", "80/20"}
    for variant, (counted, predicted) in found.items():
        assert counted == pytest.approx(predicted, rel=0.005 * steps), variant
