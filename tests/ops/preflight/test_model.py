"""Each mistake with a model's folder is found before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
from arlopti_testing.preflight_command import changed

from arlopti_openrlhf.ops.preflight import model


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    """Return a copy of the tiny model, to be broken."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def check(folder: Path | str, **flags) -> list[str]:
    """Return the findings as text, those that are fatal after "!"."""
    found = model.check(changed(actor__model_name_or_path=str(folder), **flags))
    return ["!" * finding.is_fatal + str(finding) for finding in found]


def change(path: Path, **values) -> None:
    """Change values of a JSON file. None removes one."""
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def test_a_good_model_has_no_finding(folder):
    assert check(folder) == []


@pytest.mark.parametrize(
    "name, offline, fatal, problem",
    [
        ("./nowhere", "0", True, "there is no such folder"),
        ("/a/b/c", "0", True, "there is no such folder"),
        ("nobody/nothing", "0", False, "the run looks for it on the hub"),
        ("nobody/nothing", "1", True, "HF_HUB_OFFLINE forbids to download it"),
    ],
)
def test_a_model_that_is_not_there(monkeypatch, name, offline, fatal, problem):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    [found] = check(name)
    assert found.startswith("!" * fatal + f"--actor.model_name_or_path {name}: ") and problem in found


@pytest.fixture
def cached(monkeypatch, tmp_path, tiny_model) -> Path:
    """Return the folder of some/model in the hub's cache, which holds the tiny model."""
    from huggingface_hub import constants

    cache = tmp_path / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return Path(shutil.copytree(tiny_model, cache / "snapshots/abc"))


def test_a_model_in_the_hubs_cache_is_checked(cached):
    assert check("some/model") == []
    weights = cached / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    [found] = check("some/model")
    assert found.startswith("!--actor") and "model.safetensors is not whole" in found


def test_what_the_hubs_cache_lacks_comes_from_the_hub(monkeypatch, cached):
    """Whoever has loaded a tokenizer by name has the configuration and not the weights. Offline this is an error."""
    weights, tokenizer = cached / "model.safetensors", cached / "tokenizer.json"
    whole = weights.read_bytes()
    weights.unlink()
    [found] = check("some/model", data__apply_chat_template=True)
    assert found.startswith("--actor.model_name_or_path some/model: not all of its weights are in the hub's cache")
    change(cached / "config.json", max_position_embeddings=8)
    assert [text.split()[0] for text in check("some/model")] == ["--actor.model_name_or_path", "!--data.max_len"]
    change(cached / "config.json", max_position_embeddings=8192)
    index = cached / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (cached / "1.safetensors").write_bytes(whole)
    assert check("some/model") == [found]
    tokenizer.unlink()
    _, of_tokenizer = check("some/model")
    assert "its tokenizer is not in the hub's cache, so neither" in of_tokenizer and of_tokenizer[0] != "!"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [found] = check("some/model")
    assert found.startswith("!--actor") and "2.safetensors is not there" in found
    (cached / "2.safetensors").write_bytes(whole)
    assert "it has no tokenizer; copy" in check("some/model")[0]
    index.write_text("{}")
    assert "it has no weights" in check("some/model")[0]


def test_a_folder_without_a_configuration(folder):
    (folder / "config.json").unlink()
    assert check(folder)[0].startswith(f"!--actor.model_name_or_path {folder}: it has no config.json; give the folder")
    shutil.copytree(folder, folder / "best")
    (folder / "best/config.json").write_text("{}")
    assert "it has no config.json, but best in it have one" in check(folder)[0]


def test_a_configuration_that_does_not_parse(folder):
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json cannot be read: Expecting value" in check(folder)[0]


def test_an_unknown_architecture(folder):
    change(folder / "config.json", architectures=["Qwen99ForCausalLM"])
    [found] = check(folder)
    assert "does not know the architecture Qwen99ForCausalLM" in found
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Qwen99ForCausalLM"})
    assert check(folder) == []


def test_weights_that_are_not_there_or_not_whole(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (len(whole) - 1, 100, 5, 0):
        weights.write_bytes(whole[:cut])
        [found] = check(folder)
        assert found.startswith(f"!--actor.model_name_or_path {folder}: model.safetensors ") and "copy or" in found
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "is a pointer of Git LFS" in check(folder)[0]
    weights.unlink()
    assert "it has no weights: model.safetensors, pytorch_model.bin" in check(folder)[0]


def test_weights_in_parts(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert check(folder) == []
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert "model-2.safetensors is not there" in check(folder)[0]


@pytest.mark.parametrize(
    "file, problem",
    [
        ("tokenizer.json", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "tokenizer_config.json cannot be"),
    ],
)
def test_a_broken_tokenizer(folder, file, problem):
    (folder / file).write_text('{"version": ')
    [found] = check(folder)
    assert found.startswith("!") and problem in found


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert check(folder)[0].startswith("!") and "it has no tokenizer" in check(folder)[0]
    (folder / "vocab.json").write_text("{}")
    [found] = check(folder)  # an older form of a tokenizer, which lacks its other half
    assert found.startswith("!--") and "its tokenizer cannot be loaded: ValueError" in found


def test_no_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    [found] = check(folder)
    assert found.startswith(f"!--data.apply_chat_template : the tokenizer of {folder} has no chat template")
    assert check(folder, data__apply_chat_template=False) == []


def test_neither_pad_nor_eos(folder):
    change(folder / "config.json", model_type="qwen3")  # qwen2's tokenizer would bring its own
    change(folder / "tokenizer_config.json", pad_token=None, eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    assert "no pad token and no eos token" in check(folder)[0]


def test_a_tokenizer_of_another_model(folder):
    change(folder / "config.json", vocab_size=200)
    [found] = check(folder)
    assert found.startswith("!") and "ids up to 259, but the model has 200 embeddings" in found


def test_a_context_longer_than_the_models(folder):
    [found] = check(folder, data__max_len=2048)
    assert found.startswith("!--data.max_len 2048: the model has 1024 positions, and vLLM refuses more")
    change(folder / "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert check(folder, data__max_len=2048) == []


def test_the_other_models(folder, tmp_path):
    """A critic and a reward model need no tokenizer of their own, and a model is reported once."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "tokenizer.json").unlink()
    assert check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other)) == []
    (other / "model.safetensors").unlink()
    [found] = check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other))
    assert found.startswith("!--critic.model_name_or_path")
    flags = {"reward__model_name_or_path": str(other), "reward__remote_url": ["kk"]}
    assert check(folder, **flags) == []  # a source of rewards leaves no work to the model
