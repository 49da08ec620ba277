"""What keeps a model from being loaded, or makes it another than its files say, is found before anything starts."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from arlopti_testing.preflight_command import changed
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from arlopti_openrlhf.ops.preflight import model
from arlopti_openrlhf.ops.preflight.model import load_tokenizer


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    """Return a copy of the tiny model, to be broken."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def check(folder: Path | str, **flags) -> list[str]:
    """Return the findings as text, those that are fatal after "!"."""
    load_tokenizer.cache_clear()  # a test changes the folder
    found = model.check(changed(actor__model_name_or_path=str(folder), **flags))
    return ["!" * finding.is_fatal + str(finding) for finding in found]


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    """Change the weights, by name."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def test_a_good_model_has_no_finding(folder, make_model):
    assert check(folder) == check(make_model(tied=False)) == []


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", None, "its configuration cannot be loaded: ValueError: Unrecognized model in "),
        ("config.json", '{"model_type": ', "its configuration cannot be loaded: OSError: It looks like the config"),
        ("config.json", {"model_type": "qwen99"}, "has model type `qwen99` but Transformers does not recognize"),
        ("config.json", {"vocab_size": 200}, "its class cannot be loaded: AssertionError: Padding_idx must be within"),
        ("tokenizer.json", '{"version": ', "its tokenizer cannot be loaded: JSONDecodeError: Expecting value"),
        ("tokenizer.json", None, "its tokenizer cannot be loaded: ValueError: it makes no tokens of a text"),
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\n",
            "weights cannot be loaded: ValueError: mod",
        ),
        ("model.safetensors", -1, "its weights cannot be loaded: ValueError: model.safetensors: Error while"),
    ],
)
def test_what_transformers_says_of_a_file(folder, file, content, problem):
    """None removes the file, a number cuts it, and a dict changes its values."""
    path = folder / file
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        path.write_bytes(path.read_bytes()[:content])
    elif isinstance(content, dict):
        change(path, **content)
    else:
        path.write_text(content)
    [found] = check(folder)
    assert found.startswith(f"!--actor.model_name_or_path {folder}: ") and problem in found


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("./nowhere", "correct the path"),
        ("/nowhere/at/all", "correct the path"),
        ("models/base/final", "correct the path"),
        ("models/bse-model", "correct the path or models/base-model"),
        ("bsse-model", "correct the path or base-model"),
    ],
)
def test_a_folder_that_is_not_there_is_no_name_of_the_hub(tmp_path, monkeypatch, name, remedy):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/base-model", "base-model"):
        (tmp_path / folder).mkdir(parents=True)
    [found] = check(name)
    assert found == f"!--actor.model_name_or_path {name}: there is no such folder; {remedy}"


@pytest.mark.parametrize("name", ["org/name", "name-of-1.5B"])
def test_a_model_that_is_not_here_is_not_checked_and_the_hub_is_not_asked(monkeypatch, name):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("asked"))
    [found] = check(name)
    assert found.startswith(f"--actor.model_name_or_path {name}: ") and "so it is not checked" in found


def test_what_the_hubs_cache_lacks_may_come_from_the_hub(monkeypatch, tmp_path, tiny_model):
    cache = tmp_path / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = Path(shutil.copytree(tiny_model, cache / "snapshots/abc"))
    assert check("some/model") == []
    (cached / "tokenizer.json").unlink()
    [found] = check("some/model")
    assert found.startswith("--actor") and "its tokenizer cannot be loaded" in found


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: weight for key, weight in weights.items() if name not in key}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("layers.1"), "layers.1.input_layernorm.weight is not there (and 11 more)"),
        (
            lambda weights: {key: torch.zeros(0) if "1.mlp" in key else each for key, each in weights.items()},
            "layers.1.mlp.down_proj.weight is [0] and not [64, 128] (and 2 more)",
        ),
        (
            lambda weights: {f"pretrained_model.{key}": each for key, each in weights.items()},
            "is not there (and 2",
        ),
    ],
)
def test_weights_that_do_not_fill_the_model(folder, tiny_model, change, said):
    """transformers would make random ones of what is missing, and a critic would learn from these."""
    change_tensors(folder, change)
    for found in check(folder), check(tiny_model, critic__model_name_or_path=str(folder)):
        assert len(found) == 1 and found[0].startswith("!--") and said in found[0]


def test_what_transformers_makes_up_for(folder):
    """Names without the prefix of the base model, old buffers, and a tied output that is in the files."""
    change_tensors(folder, lambda weights: {key.removeprefix("model."): each for key, each in weights.items()})
    change_tensors(folder, lambda weights: weights | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert check(folder) == []


def test_experts_that_transformers_joins(tmp_path, folder):
    """A file holds experts one by one, and the model has them in one tensor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {"hidden_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=320, num_hidden_layers=1, num_experts=4, head_dim=8, pad_token_id=None, **small)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "moe")
    assert any("experts.3." in name for name in load_file(tmp_path / "moe/model.safetensors"))
    assert check(tmp_path / "moe") == []


def test_nothing_is_printed(folder, capfd):
    change_tensors(folder, without("layers.1"))
    assert check(folder)
    assert "LOAD REPORT" not in (out := "".join(capfd.readouterr())) and "Loading weights" not in out


def test_quantized_weights(folder):
    change(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    [found] = check(folder)
    assert found.startswith("!--actor") and "its weights are quantized, and vLLM takes no trained weights" in found


def test_a_token_that_no_answer_has_may_lie_outside_of_the_embedding(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(62)])
    tokenizer.save_pretrained(folder)
    [found] = check(folder)
    assert found.startswith("--actor") and "320 embeddings: '<extra 60>' is 320 (and 1 more); use" in found
    change(folder / "tokenizer_config.json", eos_token="<extra 61>")
    [found] = check(folder)
    assert found.startswith("!--actor") and "320 embeddings: '<extra 61>' is 321; use" in found


def test_the_other_models(folder, tmp_path):
    """A critic and a reward model need no tokenizer of their own, and a model is reported once."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    change_tensors(other, lambda tensors: tensors | {"score.weight": torch.ones(1, 64)})
    (other / "tokenizer.json").unlink()
    assert check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other)) == []
    (other / "config.json").unlink()
    [found] = check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other))
    # Without a critic's flag, OpenRLHF makes the reward model the critic too.
    assert found.startswith("!--reward.model_name_or_path")
    flags = {"reward__model_name_or_path": str(other), "reward__remote_url": ["kk"]}
    assert check(folder, **flags) == []  # a source of rewards leaves no work to the model


def test_a_reward_model_needs_its_head(folder, tmp_path):
    """The head of a critic may be new. That of a reward model would give random rewards."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert check(folder, critic__model_name_or_path=str(other)) == []
    flags = {"reward__model_name_or_path": str(other)}
    [found] = check(folder, **flags)
    assert found.startswith("!--reward.model") and "do not fill a Qwen2Model: score.weight is not there" in found
    change_tensors(other, lambda tensors: tensors | {"score.weight": torch.ones(1, 64)})
    assert check(folder, **flags) == []
    change(other / "config.json", value_head_prefix="value_head")
    assert "value_head.weight is not there" in check(folder, **flags)[0]


def test_modules_that_get_no_adapter(folder):
    """PEFT says so only where the model has none of them, and raises then."""
    args = changed(actor__model_name_or_path=str(folder))
    args.ds.lora.rank = 8
    for targets, is_fatal in (["q_proj,v_proj"], True), (["q_proj", "query_key_value"], False):
        args.ds.lora.target_modules = targets
        [finding] = model.check(args)
        assert finding.is_fatal == is_fatal
    found = str(finding)
    assert found.startswith("--ds.lora.target_modules") and "no module query_key_value, which gets no adapter" in found
    for targets in ["q_proj", "v_proj"], "all-linear":
        args.ds.lora.target_modules = targets
        assert list(model.check(args)) == []
