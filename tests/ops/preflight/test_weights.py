"""Weights that are not finite are found in the files, for a bounded time."""

import shutil
from pathlib import Path

import pytest
import torch
from arlopti_testing.preflight_command import changed
from safetensors.torch import load_file, save_file

from arlopti_openrlhf.ops.preflight import model, weights


def not_finite(folder: Path) -> str | None:
    return weights.not_finite(folder, ["model.safetensors"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_is_enough(dtype, value, tmp_path):
    tensors = {name: torch.linspace(-2, 2, 1001).to(dtype) for name in "abc"}
    tensors["b"][0], tensors["c"][-1] = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    tensors |= {"count": torch.tensor([2**31 - 1, -1]), "flag": torch.tensor([True]), "none": torch.zeros(0)}
    tensors["linear.input_max"] = torch.tensor(float("inf"), dtype=dtype)  # a bound, not a weight
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not_finite(tmp_path) is None
    tensors["b"][500] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not_finite(tmp_path) == "model.safetensors: 1 of 1001 values of b are not finite"


def test_the_time_is_bounded_and_every_tensor_begins_before_any_goes_on(tmp_path, monkeypatch):
    tensors = {"large": torch.zeros(1000), "small": torch.zeros(10)}
    tensors["large"][-1] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "_BYTES", 400)
    assert not_finite(tmp_path) == "model.safetensors: 1 of 100 values of large are not finite"
    monkeypatch.setattr(weights, "_SECONDS", -1)
    assert not_finite(tmp_path) is None
    tensors["small"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "_SECONDS", 3)
    assert "small" in not_finite(tmp_path)


def test_a_model_with_nan_is_refused(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (found,) = model.check(changed(actor__model_name_or_path=str(folder)))
    assert found.is_fatal and "1 of " in found.problem and "are not finite" in found.problem
