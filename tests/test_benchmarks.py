"""The benchmark of the update phase, as a user runs it, at a hundredth of its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "update_phase.py"


def test_update_phase(tmp_path):
    flags = f"--shape tiny --scale 0.05 --repeats 1 --sizes 0.5 --json {tmp_path}/r.json"
    command = [sys.executable, BENCHMARK, *flags.split(), "--chart", tmp_path / "chart.png"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads((tmp_path / "r.json").read_text())
    assert list(record["variants"]) == ["stock GRPO", "GRPO", "AR", "Lopti", "AR + Lopti"]
    for variant in record["variants"].values():
        assert variant["memory_gib"] >= 0.5 * record["floor_gib"] > 0
        assert variant["tokens_per_s"] == pytest.approx(record["tokens"] / variant["seconds"])
    assert record["variants"]["stock GRPO"]["time_ratio"] == 1
    assert all(0 < share < 0.2 for share in record["statistics_share"].values()), record["statistics_share"]
    assert record["growth"][1]["tokens"] > 1.5 * record["growth"][0]["tokens"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
