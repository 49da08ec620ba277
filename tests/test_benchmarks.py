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


def test_update_phase(tmp_path):
    flags = "--shape toy --scale 0.03 --statistics --repeats 1 --sizes 0.5 --variants".split() + [
        "stock GRPO",
        "GRPO",
        "AR + Lopti",
    ]
    printed = run(*flags, "--json", tmp_path / "r.json", "--chart", tmp_path / "chart.png")
    record = json.loads((tmp_path / "r.json").read_text())
    ours, openrlhf = ["stock GRPO", "GRPO", "AR + Lopti"], ["OpenRLHF, packing", "OpenRLHF, gradient checkpointing"]
    measured = record["variants"]
    assert {*ours, *openrlhf} < set(measured)
    assert "Unsloth" in record["not_measured"] and "not measured: Unsloth" in printed
    for variant in measured.values():
        assert variant["memory_gib"] >= 0.5 * record["floor_gib"] > 0
        assert variant["tokens_per_s"] == pytest.approx(record["tokens"] / variant["seconds"])
        assert 0 < variant["optimizer_seconds"] < variant["seconds"]
    # They compute the same gradient, but for the rounding of bf16.
    norm = measured["stock GRPO"]["gradient_norm"]
    for variant in ("GRPO", *openrlhf):
        assert measured[variant]["gradient_norm"] == pytest.approx(norm, rel=0.02), variant
    assert measured["AR + Lopti"]["gradient_norm"] != pytest.approx(norm, rel=0.02)
    assert measured["stock GRPO"]["time_ratio"] == 1
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


@pytest.mark.long
def test_layout(tmp_path):
    command = [sys.executable, BENCHMARK.with_name("layout.py"), "--length=32", "--prompt=16", "--rounds=1"]
    result = subprocess.run([*command, f"--json={tmp_path}/r.json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads((tmp_path / "r.json").read_text())
    for row in record["tokens"]:
        assert row["ours"] < row["openrlhf"] <= row["all"] and row["our_batches"] <= row["openrlhf_batches"] + 1
    padded, matrix, segments = (results[0]["tokens"] for results in record["layouts"].values())
    assert padded == 8 * 48 and matrix == segments == 16 + sum(32 - row * 2 for row in range(8)) - 8
    assert result.stdout.count("\n| ") == 2 + 4 + 3 - 1
