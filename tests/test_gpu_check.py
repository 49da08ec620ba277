"""`benchmarks/gpu_check.py` at toy size."""

import json
import os
import subprocess
import sys
import time
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
    from pkgutil import resolve_name

    owner, _, name = "arlopti_openrlhf.FUNCTION".rpartition(".")
    right = getattr(resolve_name(owner), name)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (1.01 * result[0], result[1]) if isinstance(result, tuple) else 1.01 * result

    setattr(resolve_name(owner), name, wrong)


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
    assert all(variant["memory_gib"] > 0 < variant["seconds"] for variant in times["variants"].values())
    assert "torch 2." in result.stdout.splitlines()[0] and "2 of 2 comparisons are exact" in result.stdout
    for start in ("| toy Llama-3.2 | ", "| AR + Lopti | "):
        assert sum(line.startswith(start) for line in result.stdout.splitlines()) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "dtypes", "errors"),
    [
        ("forward.selective_actor.SelectiveActor.forward", ("float32", "bfloat16"), ("log_prob_mean", "gradient_low")),
        ("update.old_log_probs.given_by", ("float32",), ("gradient_low",)),  # log π_old, from the first pass
    ],
)
def test_a_wrong_selective_path_fails_with_the_name_of_the_row(tmp_path, function, dtypes, errors):
    """Log-probs a hundredth too large."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN.replace("FUNCTION", function))
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['gpu_check.py', '--toy']; "
        "import gpu_check; gpu_check.TOY_PARTS = gpu_check.TOY_PARTS[1:2]; gpu_check.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-3000:]
    for dtype in dtypes:
        for error in errors:
            assert f"failed: toy Llama-3.2, sdpa, {dtype}: {error}" in result.stdout


def test_out_of_memory_is_a_row(capsys):
    """Stock alone runs out of memory at 0.5B, and ours too at 3B."""
    ratios = dict.fromkeys(("time_ratio", "packed_time_ratio", "memory_ratio", "packed_memory_ratio"))
    grpo = ratios | dict(seconds=3.0, spread=[3.0, 3.0], tokens_per_s=1.0, memory_gib=2.0)

    def run(part: dict, seconds: float) -> dict:
        if part["args"]["shape"] == "3b":
            return {"out_of_memory": "all"}
        if "stock GRPO" not in part["without"]:
            return {"out_of_memory": "stock GRPO"}
        return dict(description="K&K", rounds=1, floor_gib=1.0, variants={"stock GRPO": None, "GRPO": grpo})

    parts = [(f"times {shape}", "times", {"shape": shape}) for shape in ("0.5b", "3b")]
    found = gpu_check.check(parts, time.monotonic() + 60, run, lambda found: None)
    assert found["skipped"] == ["times 3b: out of memory"] and found["failures"] == ["nothing was compared"]
    [result], printed = found["times"], capsys.readouterr().out
    assert result["without"] == ["stock GRPO"] and "times 0.5b: stock GRPO: out of memory" in printed
    assert "| stock GRPO | out of memory |" in printed and "| GRPO |  |  | 3.00 (3.00 - 3.00) |" in printed


def test_liger_kernel_is_asked_for_at_once(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.cpu, "uses_cpu", lambda: False)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", "arithmetic", "times 0.5b"])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 2 and "argument --parts: liger-kernel, of the extra [gpu]" in capsys.readouterr().err


@pytest.mark.long
def test_a_part_that_breaks_fails(tmp_path):
    """No such shape: the process ends with an error of its own."""
    result = gpu_check.run_part(dict(kind="exactness", args=dict(shape="nowhere")), 600)
    assert "nowhere" in result["error"]


def test_the_threshold_lies_in_the_widest_gap():
    log_probs = torch.log(torch.tensor([0.5] * 80 + [0.01] * 13 + [0.02] * 7))
    assert gpu_exactness.threshold(log_probs) == pytest.approx((0.01 * 0.02) ** 0.5)
