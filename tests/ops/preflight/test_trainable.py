"""A model that cannot be trained as it is, or whose weights vLLM would not take, is refused before anything starts."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from arlopti_testing.preflight_command import changed

from arlopti_openrlhf.ops.preflight import trainable


def check(folder: Path | str, **flags) -> list[str]:
    """Return the findings as text, those that are fatal after "!"."""
    args = changed(actor__model_name_or_path=str(folder), **flags)
    return ["!" * finding.is_fatal + str(finding) for finding in trainable.check(args)]


def with_lora(folder: Path | str, *targets: str) -> list[str]:
    args = changed(actor__model_name_or_path=str(folder))
    args.ds.lora.rank = 8
    if targets:
        args.ds.lora.target_modules = list(targets)
    return ["!" * finding.is_fatal + str(finding) for finding in trainable.check(args)]


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_good_model_has_no_finding(folder):
    assert check(folder) == with_lora(folder) == with_lora(folder, "q_proj", "v_proj") == []


@pytest.mark.parametrize(
    ("config", "method"),
    [
        *(
            ({"quantization_config": {"quant_method": each}}, each)
            for each in ("bitsandbytes", "gptq", "awq", "fp8", "mxfp4")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
        ({"quantization": {"bits": 4}}, "quantization"),
    ],
)
def test_quantized_weights(folder, tiny_model, config, method):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    [found] = check(folder)
    assert found.startswith(f"!--actor.model_name_or_path {folder}: its weights are quantized ({method})")
    for flag in ("critic", "reward"):
        [found] = check(tiny_model, **{f"{flag}__model_name_or_path": str(folder)})
        assert found.startswith(f"!--{flag}.model_name_or_path {folder}: its weights are quantized ({method})")
    assert check(tiny_model, reward__model_name_or_path=str(folder), reward__remote_url=["kk"]) == []


def test_weights_that_model_optimizer_has_quantized(folder):
    (folder / "hf_quant_config.json").write_text("{}")
    assert "quantized (hf_quant_config.json)" in check(folder)[0]


@pytest.mark.parametrize(("flag", "package"), [("load_in_4bit", "bitsandbytes"), ("use_liger_kernel", "liger-kernel")])
def test_a_package_that_a_flag_needs(folder, monkeypatch, flag, package):
    args = changed(actor__model_name_or_path=str(folder), **{f"ds__{flag}": True})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ["!" * finding.is_fatal + str(finding) for finding in trainable.check(args)] == [
        f"!--ds.{flag} True: it needs {package}, which is not installed; install it, or leave the flag out"
    ]


def test_ring_attention_needs_its_package(folder):
    [found] = check(folder, ds__ring_attn_size=2)
    assert found.startswith("!--ds.ring_attn_size 2: it needs ring-flash-attn")


@pytest.mark.parametrize("schedule", ["foo", "wsd", "warmup_stable_decay"])
def test_a_schedule_that_transformers_does_not_make(folder, schedule):
    [found] = check(folder, actor__lr_scheduler=schedule)
    assert found.startswith(f"!--actor.lr_scheduler {schedule}: transformers makes no such schedule")
    for known in ("linear", "cosine_warmup_with_min_lr", "constant", "inverse_sqrt"):
        assert check(folder, actor__lr_scheduler=known) == []


def test_heads_that_vllm_cannot_divide(folder):
    [found] = check(folder, vllm__tensor_parallel_size=4)
    assert found.startswith("!--vllm.tensor_parallel_size 4: vLLM divides the attention heads") and "it has 2" in found
    assert check(folder, vllm__tensor_parallel_size=2) == []


def test_modules_that_the_model_does_not_have(folder):
    [found] = with_lora(folder, "query_key_value")
    assert found.startswith("!--ds.lora.target_modules ['query_key_value']: PEFT cannot put an adapter on")
    modules = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert found.endswith(f"again; its linear modules are {modules}, which all get one without the flag")
    assert with_lora(folder, "all-linear")[0].startswith("!")  # PEFT knows it as a text, and not in a list
    assert with_lora(folder, "mlp")[0].startswith("!")
    [found] = with_lora(folder, "q_proj", "query_key_value")
    assert found.startswith("--ds.lora") and "has no module query_key_value, which gets no adapter" in found
