"""The dry run shows a prompt as the model gets it, and warns if that is not what its author means."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from arlopti_testing.preflight_command import changed
from openrlhf.utils.config import hierarchize
from tokenizers import Tokenizer, processors
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.scoring.inputs import encode
from arlopti_openrlhf.ops.preflight import data
from arlopti_openrlhf.ops.preflight.model import load_tokenizer
from arlopti_openrlhf.ops.rollouts.prompt_text import template_arguments
from arlopti_openrlhf.ops.rollouts.prompts import prepare_datasets

QUIZ = "Who is a knight?"
TEXT, CHAT = knights_knaves.chatml(QUIZ), knights_knaves.messages(QUIZ)
ANSWER = {"role": "assistant", "content": "1"}
PLAIN = {"data__apply_chat_template": False}
BOS = "<s>"


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def check(tmp_path, folder):
    """check(prompts, FLAG=VALUE...) returns the findings about data of these prompts as text, fatal ones after "!"."""

    def run(*prompts, **flags):
        load_tokenizer.cache_clear()  # a test may change the model
        rows = ({"prompt": one, "label": "1"} for one in prompts)
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = {"actor__model_name_or_path": str(folder), "data__prompt_dataset": str(tmp_path / "d.jsonl")}
        args = changed(**names | {"data__max_len": 1024} | flags)
        return ["!" * finding.is_fatal + str(finding) for finding in data.check(args)], next(
            iter(data.describe(args)), None
        )

    return run


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def put_bos_first(folder: Path) -> None:
    """Make the tokenizer one of a Llama-style base model: it has no template, and puts <s> first."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS])
    token = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[token])
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "config.json", model_type="llama")  # qwen2's tokenizer would be made anew
    change(folder / "tokenizer_config.json", bos_token=BOS, tokenizer_class="PreTrainedTokenizerFast")
    (folder / "chat_template.jinja").unlink()


def test_what_is_as_it_should_be(check):
    assert check(CHAT, QUIZ)[0] == check(TEXT, **PLAIN)[0] == []
    assert check(QUIZ, **PLAIN, data__input_template="{}")[0] == []


def test_the_prompt_is_shown_with_its_special_tokens_escaped(check, tmp_path):
    _, shown = check(QUIZ)
    expected = f"<|im_start|>user\n{QUIZ}<|im_end|>\n<|im_start|>assistant\n<think>"
    assert shown == f"the first prompt as the model gets it: 42 tokens\n  {expected!r}"
    _, shown = check(CHAT, data__max_images_per_prompt=1)
    head, begins, ends = shown.splitlines()
    assert head.startswith("the first prompt as the model gets it, without its images: ")
    assert begins.startswith("  begins '<|im_start|>system\\nYou are a helpful") and len(begins) == 92
    assert ends.endswith("Who is a knight?<|im_end|>\\n<|im_start|>assistant\\n<think>'")
    assert "unless the agent changes it" in check(QUIZ, train__agent_func_path="agent.py")[1]
    assert "\\x1b[31m" in check("\x1b[31mred")[1]
    assert check(QUIZ, actor__model_name_or_path=str(tmp_path / "nowhere"))[1] is None


@pytest.mark.parametrize(
    ("prompts", "flags", "said"),
    [
        ([TEXT, QUIZ], PLAIN, "row 2, prompt: the prompt is plain text, and "),
        ([QUIZ, TEXT], {}, "row 2, prompt: the prompt holds the chat template already, and gets it twice"),
        ([CHAT, [{"role": "user", "content": TEXT}]], {}, "row 2, prompt: the prompt holds the chat template already"),
        ([CHAT, [*CHAT, ANSWER]], {}, "row 2, prompt: the last message is the assistant's"),
        (
            [CHAT, [CHAT[0], CHAT[1] | {"role": "human"}]],
            {},
            "row 2, prompt: role 'human': the chat template does not know this role",
        ),
    ],
)
def test_a_prompt_and_a_template_that_do_not_fit(check, prompts, flags, said):
    [found], _ = check(*prompts, **flags)
    assert found.startswith("--data.apply_chat_template ") and f"d.jsonl, {said}" in found


def test_a_base_model_whose_tokenizer_has_a_template_may_get_plain_text(check, folder):
    """Qwen's base models have one, and their eos is not what it ends a turn with."""
    change(folder / "tokenizer_config.json", eos_token="<|pad|>")
    change(folder / "generation_config.json", eos_token_id=257)
    assert check(QUIZ, **PLAIN)[0] == []
    [found], _ = check(CHAT)
    assert "its chat template ends an answer with '<|im_end|>', and vLLM stops at '<|pad|>'" in found


def test_an_eos_that_the_model_does_not_write(check, folder):
    change(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    [found], _ = check(CHAT)
    assert (
        "its tokenizer's eos is '<|im_start|>', and generation_config.json ends an answer with '<|im_end|>'" in found
    )


def test_a_template_that_begins_no_answer(check, folder):
    turn = "{{% for m in messages %}}{}{{% endfor %}}"
    chatml = turn.format("<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n")
    (folder / "chat_template.jinja").write_text(chatml)
    [found], _ = check(CHAT)
    assert (
        "its chat template ends a prompt without '<|im_start|>assistant', which stands before each answer; " in found
    )
    # Mistral's need not begin one. Those of others begin one with less than what stands before an earlier answer.
    answer = "{% else %} {{ m['content'] }}<|im_end|>{% endif %}"
    inst = "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]" + answer
    asked = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    thinking = (
        "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
    )
    for template in (turn.format(inst), turn.format(thinking + "<|im_end|>\n") + asked):
        (folder / "chat_template.jinja").write_text(template)
        assert check(QUIZ)[0] == []


def test_a_tokenizer_that_puts_bos_first(check, folder):
    put_bos_first(folder)
    assert AutoTokenizer.from_pretrained(folder)("x")["input_ids"][0] == 259
    [found], _ = check(QUIZ, **PLAIN)
    assert f"its tokenizer puts {BOS} first, and OpenRLHF tokenizes prompts without special tokens: " in found
    assert found.endswith(f"d.jsonl, row 1, prompt; add --data.input_template '{BOS}{{}}'")
    found, shown = check(QUIZ, **PLAIN, data__input_template=f"{BOS}{{}}")
    assert found == [] and f"17 tokens\n  '{BOS}{QUIZ}'" in shown  # those of the text, each a byte, and one
    (folder / "chat_template.jinja").write_text(f"{BOS}{knights_knaves.CHAT_TEMPLATE}")
    assert check(CHAT)[0] == []
    (folder / "chat_template.jinja").write_text(knights_knaves.CHAT_TEMPLATE)
    assert "let its chat template begin with {{ bos_token }}" in check(CHAT)[0][0]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for m in messages %}"])
def test_a_template_that_fails(check, folder, template):
    (folder / "chat_template.jinja").write_text(template)
    [found], _ = check(CHAT, QUIZ)
    assert found.startswith("!--data.prompt_dataset ") and "row 1, prompt: Template" in found


@pytest.mark.parametrize("text", [json.dumps(CHAT), f" {CHAT}", json.dumps(CHAT, indent=1)])
def test_messages_that_are_text(check, text):
    """The user's turn would hold the JSON, or what Python prints of a list, as in a .csv."""
    for flags in ({}, PLAIN):
        [found] = [each for each in check(text, **flags)[0] if "spells out" in each]
        assert found.startswith("!--data.input_key prompt: ") and "row 1, prompt: the prompt is text that" in found
        assert found.endswith(", with --data.apply_chat_template") == bool(flags)
    [found] = [each for each in check(text, QUIZ, QUIZ)[0] if "spells out" in each]
    assert not found.startswith("!")  # a prompt may be about such a list
    assert check('[{"role"} is no JSON', "What is [{'a': 1}]?")[0] == []


def test_a_content_in_parts(check, folder):
    """A template of text models prints the list. Others know the parts."""
    parts = [{"role": "user", "content": [{"type": "text", "text": QUIZ}]}]
    [found] = check(parts)[0]
    assert found.startswith("!--data.input_key prompt: ") and "the chat template takes text, and writes" in found
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content']", "message['content'][0]['text']"))
    assert check(parts)[0] == []


def test_tools_of_a_row(check, folder, tmp_path):
    """OpenRLHF gives only the messages to a template that could show tools."""
    data_file = tmp_path / "tools.jsonl"
    data_file.write_text(json.dumps({"prompt": CHAT, "label": "1", "tools": [{"name": "search"}]}) + "\n")
    flags = {"data__prompt_dataset": str(data_file)}
    assert check(CHAT, **flags)[0] == []
    path = folder / "chat_template.jinja"
    path.write_text("{% if tools %}{{ tools }}{% endif %}" + path.read_text())
    [found] = check(CHAT, **flags)[0]
    assert found.startswith("--data.apply_chat_template True: ") and "does not give the row's tools" in found
    assert check(CHAT)[0] == []


@pytest.mark.parametrize("given", [[], ["enable_thinking=false"]])
def test_run_dry_run_and_evaluation_give_the_template_the_same_arguments(check, folder, tmp_path, given):
    """As Qwen3's template reads this one."""
    thinks = "{% if enable_thinking is defined and enable_thinking is false %}{% else %}<think>{% endif %}"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}" + thinks)
    expected = QUIZ if given else f"{QUIZ}<think>"
    findings, described = check([{"role": "user", "content": QUIZ}], data__chat_template_args=given)
    assert repr(expected) in described and not [finding for finding in findings if "chat_template_args" in finding]
    encoded, _ = encode(AutoTokenizer.from_pretrained(folder), [CHAT[-1:]], template_arguments(given))
    assert encoded == [CHAT[-1]["content"] + expected.removeprefix(QUIZ)]
    flags = f"--data.prompt_dataset {tmp_path}/d.jsonl --data.input_key prompt --data.apply_chat_template"
    flags += " --rollout.n_samples_per_prompt 1 --rollout.batch_size 1 --train.batch_size 1"
    args = hierarchize(parse([*flags.split(), *(["--data.chat_template_args", *given] if given else [])]))
    strategy = SimpleNamespace(args=args, print=print, is_rank_0=lambda: False)
    strategy.setup_dataloader = lambda data, *_, **__: DataLoader(data, batch_size=1)
    loader, _, _ = prepare_datasets(strategy, AutoTokenizer.from_pretrained(folder))
    assert loader.loader.dataset.prompts == [expected]


def test_an_argument_that_the_template_does_not_read_is_an_error(check):
    [finding] = check(CHAT, data__chat_template_args=["enable_thinkin=false"])[0]
    assert finding.startswith("!--data.chat_template_args") and "does not read enable_thinkin" in finding
    [finding] = check(TEXT, data__chat_template_args=["enable_thinking=false"], **PLAIN)[0]
    assert "no chat template is applied" in finding
