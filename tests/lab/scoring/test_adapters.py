"""A LoRA adapter is evaluated as the whole model that it makes of its base model."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arlopti_openrlhf.lab.scoring.adapters import merged
from arlopti_openrlhf.lab.scoring.inputs import expand_models


def test_an_adapter_is_merged_once_and_a_whole_model_stays(tiny_model, tmp_path, capsys):
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "final")
    tokens = torch.arange(12)[None]
    expected = model(tokens).logits
    assert expand_models([str(tmp_path / "final")]) == {"final": str(tmp_path / "final")}
    folder = merged(str(tmp_path / "final"), tmp_path / "whole")
    assert "a LoRA adapter, merged into" in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(whole(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tiny_model)(tokens).logits, expected, atol=1e-3)
    assert AutoTokenizer.from_pretrained(folder)("a") == AutoTokenizer.from_pretrained(tiny_model)("a")
    written = Path(folder, "model.safetensors").stat().st_mtime_ns
    assert merged(str(tmp_path / "final"), tmp_path / "whole") == folder
    assert Path(folder, "model.safetensors").stat().st_mtime_ns == written
    assert merged(tiny_model, tmp_path / "none") == tiny_model and not (tmp_path / "none").exists()


def test_an_adapter_without_its_base_model_is_a_value_error(tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(tmp_path / "final")
    shutil.rmtree(base)
    with pytest.raises(ValueError, match="--model .*/final: its adapter cannot be merged"):
        merged(str(tmp_path / "final"), tmp_path / "whole")
