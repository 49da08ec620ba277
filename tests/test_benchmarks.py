"""The benchmark of the update phase, as a user runs it, at a hundredth of its size."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "update_phase.py"
sys.path.insert(0, str(BENCHMARK.parent))


def run(*arguments):
    result = subprocess.run([sys.executable, BENCHMARK, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.long
def test_update_phase(tmp_path):
    variants = ["stock GRPO", "packed stock GRPO", "GRPO", "AR + Lopti"]
    flags = "--shape toy --scale 0.03 --statistics --repeats 1 --sizes 0.5 --variants".split() + variants
    unshared = "GRPO, prompts repeated"
    printed = run(*flags, unshared, "--json", tmp_path / "r.json", "--chart", tmp_path / "chart.png")
    record = json.loads((tmp_path / "r.json").read_text())
    measured = record["variants"]
    assert set(measured) == {*variants, unshared}
    for variant in measured.values():
        assert variant["memory_gib"] >= 0.5 * record["floor_gib"] > 0
        assert variant["tokens_per_s"] == pytest.approx(record["tokens"] / variant["seconds"])
        assert 0 < variant["optimizer_seconds"] < variant["seconds"]
    # They compute the same gradient, but for the rounding of bf16.
    norm = measured["stock GRPO"]["gradient_norm"]
    for variant in ("packed stock GRPO", "GRPO", unshared):
        assert measured[variant]["gradient_norm"] == pytest.approx(norm, rel=0.02), variant
    assert measured["AR + Lopti"]["gradient_norm"] != pytest.approx(norm, rel=0.02)
    assert measured["stock GRPO"]["time_ratio"] == measured["packed stock GRPO"]["packed_time_ratio"] == 1
    for variant in variants:
        assert measured[variant]["packed_time_ratio"] > 0 < measured[variant]["packed_memory_ratio"]
    tokens, without_repeats = record["tokens"], record["tokens_without_repeats"]
    assert "sharing prompts makes GRPO " in printed and f"where {tokens / without_repeats:.2f} is ideal" in printed
    # What a variant does not compute counts in its logical MFU alone.
    assert measured["GRPO"]["logical_mfu"] > measured["GRPO"]["hardware_mfu"] > 0
    assert measured["stock GRPO"]["logical_mfu"] < measured["stock GRPO"]["hardware_mfu"]
    assert all(seconds > 0 for seconds in record["statistics_seconds"].values())
    for growth in record["growth"].values():
        (few, _), (many, _) = growth["points"]
        assert many > 1.5 * few
    assert record["machine"]["products"] in ("float32", "bfloat16")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


class PretendedBench:
    """Stock's update takes 3 s and 10 ms per token, of which the optimizer takes 2.5 s; 1,000 tokens at scale 0.1."""

    optimizer_seconds = {"stock GRPO": 2.5}
    args = SimpleNamespace(scale=0.1)

    def fraction(self, size):
        return [SimpleNamespace(sequences=torch.zeros(1, int(1000 * size)))]

    def step(self, variant, samples):
        return 3 + samples[0].sequences.shape[1] / 100


@pytest.mark.parametrize(("minutes", "tokens"), [(15, 4200), (5, 2200)])
def test_the_number_of_tokens_follows_from_the_minutes(minutes, tokens):
    """20 updates in 15 minutes are 45 s each, 42 of them for tokens. In 5 they would be 15 s, of which the optimizer
    would be more than a tenth: so they are 25 s."""
    import measurements

    scale = measurements.choose_scale(PretendedBench(), minutes, updates=20)
    assert scale == pytest.approx(0.1 * tokens / 1000, rel=0.01)


def test_the_fit_divides_seconds_into_marginal_and_fixed_ones():
    import measurements

    # 2 s, and 5 s per 1,000 tokens; the last point lies 1 s above the line through the others.
    exact = measurements.fit([(1000, 7.0), (2000, 12.0), (4000, 22.0)])
    assert exact == pytest.approx(dict(seconds_per_1000_tokens=5, fixed_seconds=2, residual=0), abs=1e-9)
    assert measurements.fit([(1000, 7.0), (2000, 12.0), (4000, 23.0)])["residual"] > 0.01


COUNT = """
import json, logging
from dataclasses import replace
from types import SimpleNamespace
from torch.utils.flop_counter import FlopCounterMode
from arlopti_openrlhf import cpu
logging.disable(logging.WARNING)
cpu.enable()
from operations import numbered, operations, update_passes
from rollouts import SHAPES, make_model, unpadded
from update_bench import Bench, default_attention

# One micro-batch of both prompts: a shuffle then pads to the same length.
args = SimpleNamespace(shape="toy", scale=0.06, prompts=2, mini_batches=1, micro_batch_size=16, packing=False,
                       prompt_length=None, response_length=None)
bench = Bench(args, make_model("toy", default_attention()))
bench.step("GRPO")  # the self-check's passes are over then
found = {}
for variant, passes in update_passes(numbered(unpadded(bench.rollout)), 16).items():
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
def test_operations_are_those_that_the_updates_execute():
    """What remains are RoPE's angles, and the share of the low tokens, which is not exactly 15% here."""
    result = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, cwd=BENCHMARK.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found) == {"stock GRPO", "packed stock GRPO", "GRPO", "AR + Lopti", "80/20"}
    for variant, (counted, predicted) in found.items():
        assert counted == pytest.approx(predicted, rel=0.005), variant
