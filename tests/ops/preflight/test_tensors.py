"""The files of a model have to hold the tensors that its class needs, by transformers' own mapping of names."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from arlopti_openrlhf.ops.preflight import tensors
from arlopti_openrlhf.ops.preflight.model import load_config

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def check(folder: Path, change: Callable[[dict], dict] = dict, file: str = FILE, has_value_head: bool = False) -> list:
    """Return the misfits after a change of the tensors, by name. Those that are fatal begin with "!"."""
    changed = change(load_file(folder / FILE))
    if file == FILE:
        save_file(changed, folder / FILE, {"format": "pt"})
    else:
        torch.save(changed, folder / file)
    found = tensors.compare(folder, [file], load_config(folder), has_value_head, None)
    return [f"{'!' * is_fatal}{problem}; {remedy}" for problem, remedy, is_fatal in found]


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: weight for key, weight in weights.items() if name not in key}


@pytest.mark.parametrize("file", [FILE, "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (without("layers.1"), "lack 12 tensors of Qwen2ForCausalLM, which would be random: model.layers.1"),
        (without("model.norm"), "would be random: model.norm.weight; copy or save it again, whole"),
        (
            lambda weights: {key: torch.zeros(0) if "1.mlp" in key else each for key, each in weights.items()},
            "model.layers.1.mlp.down_proj.weight is [0] in the files and [64, 128] in the model (and 2 more); save",
        ),
        (
            lambda weights: {f"pretrained_model.{key}": each for key, each in weights.items()},
            "rename the tensors: their names in the files begin with 'pretrained_model.'",
        ),
        (
            lambda weights: {f"_orig_mod.{key}": each for key, each in weights.items()},
            "rename the tensors: their names in the files begin with '_orig_mod.'",
        ),
    ],
)
def test_a_tensor_that_is_not_there_or_has_another_shape(folder, file, change, found):
    for has_value_head in False, True:
        [problem] = check(Path(shutil.copytree(folder, folder / str(has_value_head))), change, file, has_value_head)
        assert problem.startswith("!")
        assert has_value_head or found in problem


@pytest.mark.parametrize("has_value_head", [False, True])
def test_what_transformers_makes_up_for(folder, make_model, has_value_head):
    """An output that is tied may be in the files or not, the prefix of the base model too, and old buffers."""
    untied = Path(make_model(tied=False))
    assert check(folder, has_value_head=has_value_head) == check(untied, has_value_head=has_value_head) == []
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    assert check(folder, lambda weights: weights | buffers, has_value_head=has_value_head) == []
    bare = check(folder, lambda weights: {key.removeprefix("model."): weights[key] for key in weights})
    assert bare == [] == check(folder, has_value_head=has_value_head)


def test_an_output_that_is_not_tied_is_needed(make_model):
    folder = Path(make_model(tied=False))
    assert check(Path(shutil.copytree(folder, folder / "critic")), without("lm_head"), has_value_head=True) == []
    assert "random: lm_head.weight" in check(folder, without("lm_head"))[0]


def test_a_tensor_that_is_not_used(folder):
    [found] = check(folder, lambda weights: weights | {"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)})
    assert found.startswith("Qwen2ForCausalLM does not use 1 of the tensors in its files: model.layers.2.mlp")


def test_experts_that_transformers_joins(tmp_path):
    """A file holds experts one by one, and the model has them in one tensor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {"hidden_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=32, num_hidden_layers=1, num_experts=4, head_dim=8, pad_token_id=None, **small)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    assert any("experts.3." in name for name in load_file(tmp_path / FILE))
    assert check(tmp_path) == []
    [found] = check(tmp_path, without("experts.3."))
    assert found.startswith("!tensors have another shape than config.json says: ") and "[3, " in found


def test_an_old_file_of_pytorch_is_not_compared(folder):
    weights = load_file(folder / FILE)
    torch.save(weights, folder / "old.bin", _use_new_zipfile_serialization=False)
    assert list(tensors.compare(folder, ["old.bin"], load_config(folder), False, None)) == []


def test_a_file_that_would_run_something_is_not_run_and_named(folder, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"weight": Hostile()}, folder / "hostile.bin")
    [(problem, _, is_fatal)] = tensors.compare(folder, ["hostile.bin"], load_config(folder), False, None)
    assert is_fatal and problem == "on loading hostile.bin would call posix.mkdir, which no weights do"
    assert not (tmp_path / "made").exists()


def test_nothing_is_printed(folder, capfd):
    assert check(folder, without("layers.1"))
    assert "LOAD REPORT" not in (out := "".join(capfd.readouterr())) and "Loading weights" not in out
