"""Each mistake with a model's folder is found before anything starts."""

import functools
import json
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    """Change values of a JSON file. None removes one."""
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    """Change the weights, by name."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def test_a_good_model_has_no_finding(folder):
    assert check(folder) == []


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub, which has read HF_ENDPOINT when it was imported, ask a hub at this URL."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "ENDPOINT"):
        before = getattr(constants, name)
        monkeypatch.setattr(constants, name, before.replace(constants.ENDPOINT, url))


@pytest.fixture(scope="module")
def hub():
    """Yield a function that leads to a hub with one model, org/there, and one that only some may see."""
    errors = {"/org/there/": None, "/org/gated/": (403, "GatedRepo"), "/org/bare/": (404, "EntryNotFound")}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            known = [error for name, error in errors.items() if self.path == f"{name}resolve/main/config.json"]
            status, code = (known or [(401, "RepoNotFound")])[0] or (200, "")
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield functools.partial(lead_to, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


@pytest.mark.parametrize(
    "name, offline, fatal, problem",
    [
        ("./nowhere", "0", True, "there is no such folder"),
        ("/a/b/c", "0", True, "there is no such folder"),
        ("nobody/nothing", "1", True, "HF_HUB_OFFLINE forbids to download it"),
        ("org/there", "0", False, "so the run downloads it from the hub, and none of it is checked"),
        ("org/theer", "0", True, "shows no config.json under this name; correct the name"),
        ("org/gated", "0", True, "shows no config.json under this name"),
        ("org/bare", "0", True, "shows no config.json under this name"),
        ("org/th ere", "0", True, "shows no config.json under this name"),
    ],
)
def test_a_model_that_is_not_there(monkeypatch, hub, name, offline, fatal, problem):
    hub(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    [found] = check(name)
    assert found.startswith("!" * fatal + f"--actor.model_name_or_path {name}: ") and problem in found


def test_a_hub_that_cannot_be_asked(monkeypatch):
    lead_to("http://127.0.0.1:9", monkeypatch)
    [found] = check("org/there")
    assert found.startswith("--actor.model_name_or_path org/there: neither a folder nor in the hub's cache, and ")
    assert "127.0.0.1:9 does not say whether it has it (ConnectError: " in found and "the run fails unless" in found


@pytest.fixture
def cached(monkeypatch, tmp_path, tiny_model) -> Path:
    """Return the folder of some/model in the hub's cache, which holds the tiny model."""
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


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", None, "it has no config.json; give the folder"),
        ("config.json", '{"model_type": ', "config.json cannot be read: Expecting value"),
        ("config.json", {"architectures": ["Qwen99ForCausalLM"]}, "does not know the architecture Qwen99ForCausalLM"),
        ("config.json", {"model_type": "qwen99"}, "its configuration cannot be loaded: "),
        (
            "config.json",
            {"vocab_size": 200},
            "vocab_size 200, and the weights have 320 rows (model.embed_tokens.weight)",
        ),
        ("model.safetensors", None, "it has no weights: model.safetensors, pytorch_model.bin"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("model.safetensors", -1, "model.safetensors is not whole"),
        ("model.safetensors", 100, "model.safetensors is not whole"),
        ("model.safetensors", 5, "model.safetensors is not whole"),
        ("model.safetensors", 0, "model.safetensors is not whole"),
        ("tokenizer.json", '{"version": ', "tokenizer.json cannot be read"),
        ("tokenizer.json", None, "it has no tokenizer; copy"),
        ("tokenizer_config.json", '{"version": ', "tokenizer_config.json cannot be"),
        ("chat_template.jinja", None, "has no chat template; take a model that has one"),
    ],
)
def test_a_file_that_is_not_there_or_not_whole(folder, file, content, problem):
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
    assert found.startswith("!--") and str(folder) in found and problem in found


def test_what_makes_up_for_it(folder):
    """A model may bring its own code, and without a chat template a prompt is text."""
    change(folder / "config.json", architectures=["Qwen99ForCausalLM"], auto_map={"AutoModelForCausalLM": "a.Qwen99"})
    (folder / "a.py").touch()
    (folder / "chat_template.jinja").unlink()
    assert check(folder, data__apply_chat_template=False) == []


def test_a_token_that_no_answer_has_may_lie_outside_of_the_embedding(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(62)])
    tokenizer.save_pretrained(folder)
    [found] = check(folder)
    assert found.startswith("--actor") and "320 embeddings: '<extra 60>' is 320 (and 1 more); use" in found
    change(folder / "tokenizer_config.json", eos_token="<extra 61>")
    [found] = check(folder)
    assert found.startswith("!--actor") and "320 embeddings: '<extra 61>' is 321; use" in found


def test_an_output_layer_that_config_json_ties_away(folder, make_model):
    shutil.copy(Path(make_model(tied=False), "model.safetensors"), folder)
    [found] = check(folder)
    assert (
        found.startswith("--actor")
        and "ties the output to the embedding, and the weights have another lm_head" in found
    )
    change(folder / "config.json", tie_word_embeddings=False)
    assert check(folder) == []


def test_an_adapter_is_no_model(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    [found] = check(folder)
    assert found.startswith("!--actor") and "it is an adapter of some/base, not a model; merge it: AutoPeft" in found
    (folder / "adapter_config.json").write_text("[")
    assert "it is an adapter of another model" in check(folder)[0]


def test_a_gguf_file_is_no_model(tmp_path, folder):
    (tmp_path / "model.Q4.gguf").write_bytes(b"GGUF")
    for given in (tmp_path / "model.Q4.gguf", tmp_path):
        [found] = check(given)
        assert (
            found.startswith("!--actor")
            and "model.Q4.gguf is a GGUF file, which cannot be trained; convert it" in found
        )
        assert f"arlopti model --from {tmp_path / 'model.Q4.gguf'} --out FOLDER" in found
    (folder / "model.gguf").write_bytes(b"GGUF")  # beside the model itself
    assert check(folder) == []
    [found] = check(folder / "model.safetensors")
    assert found.endswith(f"it is a file; give the folder of a model, as {folder} may be")


def test_a_folder_of_folders(folder):
    shutil.copytree(folder, folder / "best")
    (folder / "config.json").unlink()
    assert "it has no config.json, but best in it have one" in check(folder)[0]
    shutil.move(folder / "best", folder / "actor" / "huggingface")
    assert "it has no config.json, but actor/huggingface in it have one" in check(folder)[0]


def test_weights_in_parts(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert check(folder) == []
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert "model-2.safetensors is not there" in check(folder)[0]


def test_an_older_form_of_a_tokenizer_that_lacks_its_other_half(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    [found] = check(folder)
    assert found.startswith("!--") and "its tokenizer cannot be loaded: ValueError" in found


def test_neither_pad_nor_eos(folder):
    change(folder / "config.json", model_type="llama")  # qwen2's tokenizer would bring its own
    change(folder / "tokenizer_config.json", pad_token=None, eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    assert "no pad token and no eos token" in check(folder)[-1]  # after biases that Llama does not use


def test_a_context_longer_than_the_models(folder):
    [found] = check(folder, data__max_len=2048)
    assert found.startswith("!--data.max_len 2048: the model has 1024 positions, and vLLM refuses more")
    change(folder / "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert check(folder, data__max_len=2048) == []


def test_the_other_models(folder, tmp_path):
    """A critic and a reward model need no tokenizer of their own, and a model is reported once."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    change_tensors(other, lambda tensors: tensors | {"score.weight": torch.ones(1, 64)})
    (other / "tokenizer.json").unlink()
    assert check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other)) == []
    (other / "model.safetensors").unlink()
    [found] = check(folder, critic__model_name_or_path=str(other), reward__model_name_or_path=str(other))
    # Without a critic's flag, OpenRLHF makes the reward model the critic too.
    assert found.startswith("!--reward.model_name_or_path")
    flags = {"reward__model_name_or_path": str(other), "reward__remote_url": ["kk"]}
    assert check(folder, **flags) == []  # a source of rewards leaves no work to the model


def test_a_reward_model_needs_its_head(folder, tmp_path):
    """The head of a critic may be new. That of a reward model would give random rewards."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    flags = {"critic__model_name_or_path": str(other)}
    assert check(folder, **flags) == []
    flags = {"reward__model_name_or_path": str(other)}
    [found] = check(folder, **flags)
    assert (
        found.startswith("!--reward.model") and "lack 1 tensors of Qwen2Model, which would be random: score" in found
    )
    change_tensors(other, lambda tensors: tensors | {"score.weight": torch.ones(2, 64)})
    [found] = check(folder, **flags)
    assert "score.weight is [2, 64] in the files and [1, 64] in the model; give the weights" in found
    change(other / "config.json", value_head_prefix="value_head")
    assert "which would be random: value_head.weight" in check(folder, **flags)[0]


def test_code_that_the_model_does_not_bring(folder, cached):
    """The hub may still give it."""
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X", "AutoModel": "a/b--c.X"}
    change(folder / "config.json", auto_map=code | {"AutoModelForTokenClassification": "other.X"})
    [found] = check(folder)
    problem = "config.json names code that is not in the folder: configuration_x.py, modeling_x.py; copy"
    assert found.startswith("!--actor.model") and problem in found
    change(cached / "config.json", auto_map=code)
    [found] = check("some/model")
    assert found.startswith("--actor.model") and problem in found
