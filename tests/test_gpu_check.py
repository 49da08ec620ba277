"""`benchmarks/gpu_check.py` at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_check  # noqa: E402
import gpu_exactness  # noqa: E402

BROKEN = """
import sys
from importlib.machinery import PathFinder


class Break:
    def find_spec(self, name, path=None, target=None):
        if name != "gpu_exactness":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            break_what_it_checks()

        spec.loader.exec_module = exec_module
        return spec


def break_what_it_checks():
    from arlopti_openrlhf.forward.selective_actor import SelectiveActor

    right = SelectiveActor.forward

    def wrong(self, *args, **kwargs):
        result = right(self, *args, **kwargs)
        return (1.01 * result[0], result[1]) if isinstance(result, tuple) else 1.01 * result

    SelectiveActor.forward = wrong


sys.meta_path.insert(0, Break())
"""


@pytest.mark.long
def test_toy_check(tmp_path):
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--toy", "--out", tmp_path / "gpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["skipped"] == record["failures"] == []
    assert record["left_out"] == [
        "flex_attention (needs a GPU)",
        "flash_attention_2 (flash_attn is not installed)",
    ]
    rows = record["exactness"]
    assert [(row["name"], row["dtype"]) for row in rows] == [
        ("toy Llama-3.2", dtype) for dtype in ("float32", "bfloat16")
    ]
    for row in rows:
        assert row["prompts"] == "shared" and len(row["selective"]) == 6
        assert all(0 < error < 0.05 for error in row["plain_bf16"].values())
    assert [(row["name"], row["failures"]) for row in record["arithmetic"]] == 2 * [("attention", []), ("LM head", [])]
    times, long = record["times"]
    assert "gradient checkpointing" in long["description"] and times["profile"]["top"]
    assert list(times["variants"]) == ["stock GRPO", "packed stock GRPO", "GRPO", "AR", "Lopti", "AR + Lopti", "80/20"]
    assert times["variants"]["stock GRPO"]["time_ratio"] == 1
    assert all(variant["memory_gib"] > 0 < variant["logical_mfu"] for variant in times["variants"].values())
    page = (tmp_path / "gpu.md").read_text()
    assert "2 of 2 comparisons are exact" in page and str(record["command"]) in page and "torch 2." in page


@pytest.mark.long
def test_a_wrong_selective_path_fails_with_the_name_of_the_row(tmp_path):
    """Log-probs a hundredth too large."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['gpu_check.py', '--toy']; "
        "import gpu_check; gpu_check.TOY_PARTS = gpu_check.TOY_PARTS[1:2]; gpu_check.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-3000:]
    assert "0 of 2 comparisons are exact" in result.stdout
    for dtype in ("float32", "bfloat16"):
        assert f"- toy Llama-3.2, sdpa, {dtype}: log_prob_mean" in result.stdout
        assert f"- toy Llama-3.2, sdpa, {dtype}: gradient_low" in result.stdout


def variant(seconds: float, stock: float | None) -> dict:
    ratio = stock and seconds / stock
    times = dict(seconds=seconds, spread=[seconds, seconds], time_ratio=ratio, packed_time_ratio=None)
    return times | dict(
        tokens_per_s=1.0,
        memory_gib=2.0,
        memory_ratio=ratio,
        packed_memory_ratio=None,
        logical_mfu=0.5,
        hardware_mfu=None,
    )


def times(part: dict, seconds: float) -> dict:
    """Stands for a machine on which stock runs out of memory where ours does not."""
    if part["args"]["shape"] == "3b":
        return {"out_of_memory": "all"}
    if "stock GRPO" not in part["without"]:
        return {"out_of_memory": "stock GRPO"}
    found = {"stock GRPO": None, "GRPO": variant(3.0, None)}
    return dict(description="K&K", rounds=1, attention="sdpa", matrix_flops_per_s=1e12, variants=found) | dict(
        floor_gib=1.0, profile=None
    )


@pytest.mark.long
def test_a_part_that_breaks_fails(tmp_path):
    """No such shape: the process ends with an error of its own."""
    result = gpu_check.run_part(dict(kind="exactness", args=dict(shape="nowhere")), 600)
    assert "nowhere" in result["error"]


def test_the_threshold_lies_in_the_widest_gap():
    log_probs = torch.log(torch.tensor([0.5] * 80 + [0.01] * 13 + [0.02] * 7))
    assert gpu_exactness.threshold(log_probs) == pytest.approx((0.01 * 0.02) ** 0.5)
