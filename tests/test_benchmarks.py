"""The benchmark of the update phase, as a user runs it, at a hundredth of its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "update_phase.py"


def run(*arguments):
    result = subprocess.run([sys.executable, BENCHMARK, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_update_phase(tmp_path):
    flags = "--shape toy --scale 0.03 --repeats 1 --sizes 0.5 --variants".split() + [
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


def test_the_number_of_tokens_follows_from_the_minutes(tmp_path):
    flags = "--shape toy --no-peers --no-statistics --repeats 1 --sizes --variants".split() + ["stock GRPO"]
    run(*flags, "--minutes", 0.05, "--json", tmp_path / "few.json")
    run(*flags, "--minutes", 0.5, "--json", tmp_path / "many.json")
    few, many = (json.loads((tmp_path / f"{name}.json").read_text())["tokens"] for name in ("few", "many"))
    assert many > 2 * few


def test_the_fit_divides_seconds_into_marginal_and_fixed_ones():
    sys.path.insert(0, str(BENCHMARK.parent))
    import update_bench

    # 2 s, and 5 s per 1,000 tokens; the last point lies 1 s above the line through the others.
    exact = update_bench.fit([(1000, 7.0), (2000, 12.0), (4000, 22.0)])
    assert exact == pytest.approx(dict(seconds_per_1000_tokens=5, fixed_seconds=2, residual=0), abs=1e-9)
    assert update_bench.fit([(1000, 7.0), (2000, 12.0), (4000, 23.0)])["residual"] > 0.01
