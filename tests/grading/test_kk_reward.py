"""The knights-and-knaves reward: its rule by hand and against an oracle, hostile text, templates, the contract."""

import asyncio
import random
import re
import runpy
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arlopti_openrlhf.grading import kk_reward
from arlopti_openrlhf.grading.kk_reward import KkGrade, assistant_turn, grade, reward_func

SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"
ANSWER = "(1) Zoey is a knight\n(2) Oliver is a knave"
WRONG_ANSWER = "(1) Zoey is a knave\n(2) Oliver is a knave"

RIGHT = KkGrade(1.0 + 2.0, 1.0, well_formed=True, answered=True)
WRONG = KkGrade(1.0 - 1.5, 0.0, well_formed=True, answered=True)
UNREADABLE = KkGrade(1.0 - 2.0, 0.0, well_formed=True, answered=False)
MALFORMED = KkGrade(-1.0 - 2.0, 0.0, well_formed=False, answered=False)


def turn(answer: str, thought: str = "Suppose Zoey is a knave. Then knaves tell the truth.") -> str:
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


# ── The rule ──


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # Free: order, case, white space, words around, end of sentence.
        ("Oliver is a knave, and Zoey is a knight.", RIGHT),
        ("ZOEY IS A KNIGHT; oliver Is A kNaVe", RIGHT),
        ("Zoey\n\tis\u00a0a\u3000knight. Oliver \x1c is \x85 a\r\nknave!", RIGHT),
        ("**Zoey is a knight** and (Oliver is a knave)", RIGHT),
        ("Zoey is a knight</think Oliver is a knave", RIGHT),
        ("Zoey is a knave and Oliver is a knight", WRONG),
        # The count: 2 people, so exactly 2 role words, wherever they stand.
        ("Zoey is a knight", UNREADABLE),
        ("Zoey is a knight, Oliver is a knave, Emma is a knave", UNREADABLE),
        ("Zoey is a knight or a knave, Oliver is a knave", UNREADABLE),
        ("Zoey is a knight, Oliver is a knave. Zoey is a knave", UNREADABLE),
        ("The knight: Zoey is a knight. Oliver is a knave", UNREADABLE),
        ("midknights: Zoey is a knight. Oliver is a knave", UNREADABLE),
        # The sentences.
        ("Zoey is a knight, Zoey is a knave", UNREADABLE),
        ("Zoey is a knights, Oliver is a knave", UNREADABLE),
        ("Zoey is a knight_, Oliver is a knave", UNREADABLE),
        ("xZoey is a knight, Oliver is a knave", UNREADABLE),
        ("_Zoey is a knight, Oliver is a knave", UNREADABLE),
        ("Zoeys is a knight, Oliver is a knave", UNREADABLE),
        ("Zoeyis a knight, Oliver is a knave", UNREADABLE),
        ("Zoey is aknight, Oliver is a knave", UNREADABLE),
        ("Zoey is the knight, Oliver is a knave", UNREADABLE),
        ("Zoey: knight, Oliver: knave", UNREADABLE),
        ("Zoey is not a knight, Oliver is a knave", UNREADABLE),
        ("Zoey is a **knight**, Oliver is a knave", UNREADABLE),
        ("Zoey\u200bis a knight, Oliver is a knave", UNREADABLE),
        # Empty.
        ("", UNREADABLE),
        (" \n\t\u3000", UNREADABLE),
        ("\x00", UNREADABLE),
        ("\ud800 \udfff", UNREADABLE),
        ("\ud800Zoey is a knight\udfff\x00Oliver is a knave\ud800", RIGHT),
        # Unicode's relatives of ASCII letters. Ignoring case, a pattern takes ſ for s, the Kelvin sign for k, ı and İ
        # for i; lower() turns only the Kelvin sign into an ASCII letter, so the count does not see the other three.
        ("Zoey iſ a knight, Oliver is a knave", RIGHT),
        ("Zoey is a \u212anight, Oliver is a knave", RIGHT),
        ("Zoey is a kn\u0131ght, Ol\u0130ver is a knave", UNREADABLE),
        ("Zoey is a kn\u0131ght, Oliver is a knave; knight", WRONG),
        ("Zoey is a kn\u0130ght, Oliver is a knave; knight", WRONG),
    ],
)
def test_answers(answer, expected):
    assert grade(turn(answer), SOLUTION) == expected


@pytest.mark.parametrize(
    "response",
    [
        "",
        "<think>",
        "<answer>" + ANSWER + "</answer>",
        f"<think>t</think>{ANSWER}",
        f"<think>t</think><answer>{ANSWER}",
        f"<think>t<answer>{ANSWER}</answer>",
        f"t</think><answer>{ANSWER}</answer>",
        f"</think>t<think><answer>{ANSWER}</answer>",
        f"<think>t</think></answer>{ANSWER}<answer>",
        f"<answer>{ANSWER}</answer><think>t</think>",
        f"<think>t<answer>{ANSWER}</answer></think>",
        f"<think><think>t</think><answer>{ANSWER}</answer>",
        f"<think>t</think></think><answer>{ANSWER}</answer>",
        f"<think>t</think><answer><answer>{ANSWER}</answer>",
        f"<think>t</think><answer>{ANSWER}</answer></answer>",
        f"<think>the <answer> tag</think><answer>{ANSWER}</answer>",
        f"<think>t</think><answer>{WRONG_ANSWER}</answer><answer>{ANSWER}</answer>",
        f"<THINK>t</THINK><ANSWER>{ANSWER}</ANSWER>",
        f"<think >t</think><answer>{ANSWER}</answer>",
        f"<think>t</think><answer>{ANSWER}</answer>".replace("<", "\uff1c"),
    ],
)
def test_malformed_responses(response):
    assert grade(response, SOLUTION) == MALFORMED


def test_text_between_and_around_the_parts_is_free():
    response = f"Sure!<think></think> so </ answer> <Answer> <answer>{ANSWER}</answer><|im_end|>\x00\ud800"
    assert grade(response, SOLUTION) == RIGHT


def test_a_names_first_sentence_counts():
    # Three people and three role words, so the count holds; Zoey is first a knave.
    solution = "(1) Zoey is a knight\n(2) Oliver is a knave\n(3) A is a knight"
    answer = "Zoey is a knave. Zoey is a knight. Oliver is a knave"
    assert grade(turn(answer), solution) == UNREADABLE  # nothing about A
    solution = "(1) Zoey is a knight\n(2) knave is a knight"
    # "knave" is a name here: one role word serves as Zoey's role and as the next sentence's name.
    assert grade(turn("Zoey is a knave is a knight"), solution) == WRONG
    solution = "(1) Zoey is a knave\n(2) knave is a knight"
    assert grade(turn("Zoey is a knave is a knight"), solution) == RIGHT


@pytest.mark.parametrize(
    "name", ["A.B+", "+", ".net", "Zoë", "Zoe\u0308", "李雷", "Mary Ann", "O'Neil", "(x", "\\d", "\ud800", "İ"]
)
def test_names_beyond_ascii_letters(name):
    solution = f"(1) {name} is a knight\n(2) Oliver is a knave"
    assert grade(turn(solution), solution) == RIGHT
    assert grade(turn(f"{name}  is a knight,Oliver is a knave"), solution) == RIGHT
    assert grade(turn(f"Oliver is a knave,{name} is a knave"), solution) == WRONG
    assert grade(turn(f"x{name} is a knight, Oliver is a knave"), solution) == UNREADABLE
    assert grade(turn(f"{name}is a knight, Oliver is a knave"), solution) == UNREADABLE
    assert grade(turn("AxBB is a knight, Oliver is a knave"), solution) == UNREADABLE


@pytest.mark.parametrize("longer", ["Mary Ann", "Mary-Ann", "mary ann"])
def test_a_name_within_a_longer_name_is_not_that_name(longer):
    solution = f"(1) Ann is a knight\n(2) {longer} is a knave"
    assert grade(turn(f"{longer} is a knave, Ann is a knight"), solution) == RIGHT
    assert grade(turn(f"{longer} is a knave, {longer} is a knight"), solution) == UNREADABLE


def _folded(char: str) -> str:
    return {"ſ": "s", "\u212a": "k", "ı": "i", "İ": "i"}.get(char, char.lower())


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _stated_role(text: str, name: str) -> str | None:
    """By hand, character by character: the role in the first "NAME is a ROLE" of `text`."""

    def word_at(at: int, word: str) -> bool:
        return [_folded(c) for c in text[at : at + len(word)]] == list(word.lower())

    for start in range(len(text)):
        if start and _is_word(text[start - 1]):
            continue
        at = start
        for word in (name, "is", "a", "role"):
            if word == "role":
                for role in ("knight", "knave"):
                    end = at + len(role)
                    if word_at(at, role) and not (end < len(text) and _is_word(text[end])):
                        return text[at:end].lower()
            elif word_at(at, word):
                at += len(word)
                gap = at
                while at < len(text) and text[at].isspace():
                    at += 1
                if at > gap:
                    continue
            break
    return None


def _oracle(response: str, people: dict[str, str]) -> tuple[float, float, bool, bool]:
    if re.findall("</?(?:think|answer)>", response) != ["<think>", "</think>", "<answer>", "</answer>"]:
        return (-3.0, 0.0, False, False)
    answer = response.split("<answer>")[1].split("</answer>")[0].strip()
    told = {name: _stated_role(answer, name) for name in people}
    if len(re.findall("knight|knave", answer.lower())) != len(people) or None in told.values():
        return (-1.0, 0.0, True, False)
    return (3.0, 1.0, True, True) if told == people else (-0.5, 0.0, True, True)


PEOPLE = {"Zoey": "knight", "Oliver": "knave", "Al": "knave"}
ROLES = "\n".join(f"({i}) {name} is a {role}" for i, (name, role) in enumerate(PEOPLE.items(), 1))


def _some_response(rng: random.Random) -> str:
    tags = ["<think>", "</think>", "<answer>", "</answer>", "<think", "/answer>", "<answer></answer>", "Assistant:"]
    names = [*PEOPLE, "zoey", "OLIVER", "al", "Alal", "_Al", "Zoeyſ", "Emma"]
    roles = ["knight", "knave", "KNIGHT", "Knave", "knights", "knave_", "\u212anave", "kn\u0131ght", "kn\u0130ght"]
    joins = [" "] * 20 + ["\n", "\t ", "\u00a0", "\x1c", "\x85", "\u200b", "", "-"]
    junk = ["is", "a", " is a ", "İ", "ſ", "\x00", "\ud800", "李雷", "é", "e\u0301", ", ", ". ", "(1) ", "🤥", "  "]

    def sentence(name: str, role: str) -> str:
        return f"{name}{rng.choice(joins)}{rng.choice(['is', 'is', 'iſ'])} a{rng.choice(joins)}{role}"

    def answer() -> str:
        parts = [sentence(name, rng.choice([role] * 15 + roles)) for name, role in PEOPLE.items()]
        rng.shuffle(parts)
        if rng.random() < 0.2:
            parts[rng.randrange(3)] = sentence(rng.choice(names), rng.choice(roles))
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(junk + roles + names))
        return rng.choice([", ", ". ", "\n", "\n(2) ", ""]).join(parts)

    parts = ["<think>", rng.choice(junk), "</think>", "<answer>", answer(), "</answer>"]
    if rng.random() < 0.25:
        for _ in range(rng.randrange(1, 4)):
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(tags + junk + names + roles))
    if rng.random() < 0.05:
        parts.pop(rng.randrange(len(parts)))
    if rng.random() < 0.05:
        rng.shuffle(parts)
    return "".join(parts)


@given(st.integers(0, 2**32))
def test_agrees_with_an_independent_oracle(seed):
    rng = random.Random(seed)
    for _ in range(50):
        text = _some_response(rng)
        assert grade(text, ROLES) == _oracle(text, PEOPLE), text


@pytest.mark.parametrize(
    "solution",
    [
        None,
        3,
        ["(1) Zoey is a knight"],
        {"names": ["Zoey"]},
        "",
        " \n ",
        "Zoey is a knight",
        "(1) Zoey is a knight, (2) Oliver is a knave",
        "(0) Zoey is a knight",
        "(2) Zoey is a knight\n(1) Oliver is a knave",
        "(1) Zoey is a knight\n(3) Oliver is a knave",
        "(\u0661) Zoey is a knight",
        "(1) Zoey is a spy",
        "(1) Zoey is a Knight",
        "(1) Zoey is a knight.",
        "(1)  is a knight",
        "(1) Zoey is a knight\n(2) Zoey is a knave",
        "(1) Zoey is a knight\n(2) zoey is a knave",
        "(1) Zoey is a knight\n42",
    ],
)
def test_a_label_that_is_no_solution_raises_and_is_shown(solution):
    for response in (turn(ANSWER), "", "<think>"):
        with pytest.raises(ValueError, match=re.escape(repr(solution))):
            grade(response, solution)
    with pytest.raises(ValueError, match=re.escape(repr(solution))):
        reward_func([turn(ANSWER)], [""], [solution])


def test_a_huge_label_is_shown_shortened():
    with pytest.raises(ValueError, match="aaaa") as error:
        grade("", "a" * 1_000_000)
    assert len(str(error.value)) < 500 and "1000002 characters" in str(error.value)


def test_blank_lines_and_carriage_returns_in_a_solution_are_harmless():
    assert grade(turn(ANSWER), "\n(1) Zoey is a knight\r\n\n  (2) Oliver is a knave\n") == RIGHT


# ── Time ──

SHELL = "<think></think><answer>{}; knight knave</answer>"  # passes the format and the count
HOSTILE = {
    "half a sentence": lambda n: SHELL.format("Zoey is a " * (n // 10)),
    "a name": lambda n: SHELL.format("Zoey" * (n // 4)),
    "a name, spaced": lambda n: SHELL.format("Zoey " * (n // 5)),
    "white space": lambda n: SHELL.format(" " * n),
    "white space after a name": lambda n: SHELL.format("Zoey" + " " * n),
    "white space in every gap": lambda n: SHELL.format("Zoey" + " " * (n // 2) + "is" + "\t" * (n // 2) + "a"),
    "lines": lambda n: SHELL.format("Zoey\n" + "\n" * n),
    "one tag": lambda n: "<think>" * (n // 7),
    "all tags": lambda n: "<think></think><answer></answer>" * (n // 32),
    "half a tag": lambda n: "</answer" * (n // 8),
    "angles": lambda n: "<" * n,
    "null bytes": lambda n: "\x00" * n,
    "lone surrogates": lambda n: SHELL.format("\ud800" * n),
    "growing in lower case": lambda n: SHELL.format("İ" * n),
    "roles": lambda n: SHELL.format("knight" * (n // 6)),
}


def _cpu_seconds(call, *args) -> float:
    # The thread's own processor time, best of 2: other processes of the machine do not count.
    best = float("inf")
    for _ in range(2):
        start = time.thread_time()
        call(*args)
        best = min(best, time.thread_time() - start)
    return best


def _assert_linear(call, make_args) -> None:
    small = _cpu_seconds(call, *make_args(250_000))
    large = _cpu_seconds(call, *make_args(1_000_000))
    # Four times the text: linear is 4, quadratic 16. The constant keeps the noise of short times out.
    assert large < 10 * small + 0.02, (small, large)
    assert large < 2.0


@pytest.mark.parametrize("kind", HOSTILE)
def test_grading_takes_linear_time(kind):
    _assert_linear(grade, lambda n: (HOSTILE[kind](n), SOLUTION))


@pytest.mark.parametrize(
    "make_args",
    [
        lambda n: ("a" * n, "a" * n + "b"),
        lambda n: (" a" * (n // 2), "a" * n),
        lambda n: (" " * n, "prompt of no spaces, quite long"),
        lambda n: ("\n".join(["x"] * (n // 2)), "y" * n),
        lambda n: ("<|im_start|>" * (n // 12), ""),
        lambda n: ("Assistant" * (n // 9), "Assistant:" * (n // 10)),
        lambda n: ("s " + PROMPT + "<|im_start|>assistant\n<think>" * (n // 29), PROMPT),
    ],
)
def test_finding_the_turn_takes_linear_time(make_args):
    _assert_linear(assistant_turn, make_args)


# ── The assistant's turn ──

# Prompts speak of the tags and show an answer: graded with the response they would break its format.
SYSTEM = (
    "The reasoning process and answer are enclosed within <think> </think> and<answer> </answer> tags, i.e., <think> "
    "reasoning process here </think><answer> answer here </answer>.  State it like <answer> (1) Zoey is a knight\n"
    "(2) ... </answer>."
)
USER = "A very special island has 2 people: Zoey, and Oliver. Zoey said: \u201cOliver lies\u201d . Who is a knave ?"
PROMPT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n<think>\n"
)
LLAMA3 = (
    f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|><|start_header_id|>user"
    f"<|end_header_id|>\n\n{USER}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
TEMPLATES = {
    "chatml, prefilled": PROMPT,
    "chatml": PROMPT.removesuffix("<think>\n"),
    "llama 3": LLAMA3,
    "llama 3, prefilled": LLAMA3 + "<think>",
    "llama 4": f"<|begin_of_text|><|header_start|>user<|header_end|>\n\n{USER}<|eot|><|header_start|>assistant"
    "<|header_end|>\n\n",
    "gemma": f"<bos><start_of_turn>user\n{SYSTEM}\n\n{USER}<end_of_turn>\n<start_of_turn>model\n",
    "mistral": f"<s>[INST] {SYSTEM}\n\n{USER} [/INST]",
    "deepseek": f"<｜begin▁of▁sentence｜>{SYSTEM}<｜User｜>{USER}<｜Assistant｜><think>\n",
    "zephyr": f"<|system|>\n{SYSTEM}</s>\n<|user|>\n{USER}</s>\n<|assistant|>\n",
    "vicuna": f"{SYSTEM} USER: {USER} ASSISTANT:",
    "logic-rl base": f"{SYSTEM}\nUser: {USER}\nAssistant: <think>",
    "several turns": f"{PROMPT}Hm.</think><answer>Zoey is a knight</answer><|im_end|>\n<|im_start|>user\nThink again"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "plain": f"{SYSTEM}\n{USER}\n",
    "bare": USER,
}


def sampled(prompt: str, answer: str = ANSWER) -> str:
    """What a model would go on with: it does not repeat a `<think>` that the prompt holds already."""
    response = turn(answer)
    return response.removeprefix("<think>") if prompt.rstrip().endswith("<think>") else response


def graded(query: str, prompt: str | None) -> KkGrade:
    return grade(assistant_turn(query, prompt), SOLUTION)


@pytest.mark.parametrize("template", TEMPLATES)
def test_turn_follows_the_prompt(template):
    prompt = TEMPLATES[template]
    prefill = prompt[prompt.rstrip().rindex("<think>") :] if prompt.rstrip().endswith("<think>") else ""
    assert assistant_turn(prompt + sampled(prompt), prompt) == prefill + sampled(prompt)
    assert assistant_turn(prompt, prompt) == prefill
    assert graded(prompt + sampled(prompt) + "<|im_end|>", prompt) == RIGHT
    assert graded(prompt + sampled(prompt, WRONG_ANSWER), prompt) == WRONG


@pytest.mark.parametrize("closed", ["</think>", "<think>\n\n</think>\n\n"])
def test_a_thought_that_the_template_ends_is_no_part_of_the_answer(closed):
    prompt = f"{PROMPT.removesuffix('<think>' + chr(10))}{closed}"
    for shown in (prompt, "<s>" + prompt):
        assert graded(f"{shown}<answer>{ANSWER}</answer>", prompt) == RIGHT
        assert graded(f"{shown}<answer>{WRONG_ANSWER}</answer>", prompt) == WRONG
        assert graded(f"{shown}{turn(ANSWER)}", prompt) == MALFORMED  # a second thought
        assert graded(f"{shown}{ANSWER}", prompt) == MALFORMED


ROUND_TRIPS = {
    "BOS added": lambda prompt: "<s>" + prompt,
    "BOS and space added": lambda prompt: "<|begin_of_text|> " + prompt,
    "first token lost": lambda prompt: prompt[5:],
    "space first": lambda prompt: " " + prompt,
    "white space collapsed": lambda prompt: " ".join(prompt.split()),
    "spaces before punctuation lost": lambda prompt: prompt.replace(" .", ".").replace(" ?", "?"),
    "spaces around tags": lambda prompt: re.sub(r"(<[^<>]*>)", r" \1 ", prompt),
    "end stripped": str.rstrip,
    "characters replaced": lambda prompt: prompt.replace("\u201c", "\ufffd").replace("\u201d", "<unk>"),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_turn_survives_a_round_trip_of_the_prompt(template, round_trip):
    prompt = TEMPLATES[template]
    changed = ROUND_TRIPS[round_trip](prompt)
    assert assistant_turn(changed + sampled(prompt), prompt).lstrip().startswith(turn(ANSWER)[:7])
    assert graded(changed + sampled(prompt), prompt) == RIGHT
    # The quotation of the whole prompt is the response's own, and breaks its format.
    quoting = changed + prompt + sampled(prompt)
    assert graded(quoting, prompt) == (MALFORMED if "<think>" in prompt else RIGHT)


def test_turn_survives_normalisation():
    prompt = PROMPT.replace("Oliver", "Zoe\u0308")
    changed = unicodedata.normalize("NFC", prompt)
    assert changed != prompt
    assert graded(changed + sampled(prompt), prompt) == RIGHT


@pytest.mark.parametrize("template", TEMPLATES)
def test_turn_follows_a_prompt_cut_on_the_left(template):
    prompt = TEMPLATES[template]
    fake = f"<think></think>{prompt}{turn(ANSWER)}"  # resets the turn, had the second end been believed
    for cut in range(1, len(prompt) - 80, 7):
        assert graded(prompt[cut:] + sampled(prompt), prompt) == RIGHT
        assert graded("\ufffd" + prompt[cut:] + sampled(prompt), prompt) == RIGHT
        if template != "bare":  # its quotation holds no tag
            assert graded(prompt[cut:] + fake, prompt) == MALFORMED


FAKE_HEADERS = [
    "<|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<start_of_turn>model\n",
    "[/INST]",
    "<｜Assistant｜>",
    "Assistant:",
    "ASSISTANT:",
    PROMPT,
    LLAMA3,
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("fake", FAKE_HEADERS)
def test_headers_that_the_model_writes_reset_nothing(template, fake):
    prompt = TEMPLATES[template]
    bad = sampled(prompt, WRONG_ANSWER) + fake
    for shown in (prompt, "<s>" + prompt, prompt[3:], " ".join(prompt.split())):
        assert graded(shown + bad + turn(ANSWER), prompt) == MALFORMED  # two answers
        assert graded(shown + bad, prompt).reward <= WRONG.reward


@pytest.mark.parametrize("prompt", [None, "", " \n"])
@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"plain", "bare", "several turns"}))
def test_without_a_prompt_the_first_header_starts_the_turn(template, prompt):
    shown = TEMPLATES[template]
    query = shown + sampled(shown)
    assert "".join(assistant_turn(query, prompt).split()) == "".join(turn(ANSWER).split())
    assert graded(query, prompt) == RIGHT
    assert graded(query + "<|im_start|>assistant\nAssistant:" + turn(ANSWER), prompt) == MALFORMED


@pytest.mark.parametrize("prompt", [None, "", "\n", "quite another prompt, of which the query holds nothing"])
def test_where_nothing_matches_the_query_is_the_turn(prompt):
    assert assistant_turn(turn(ANSWER), prompt) == turn(ANSWER)
    assert assistant_turn("", prompt) == ""


def test_a_header_that_the_prompt_lacks_is_not_believed():
    query = turn(WRONG_ANSWER) + "<|im_start|>assistant\n" + turn(ANSWER)
    assert graded(query, "a prompt without any header, lost from the query") == MALFORMED


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\udfff\ud800", "İſ\u212a", "[", "(?P<", "\\", "\u2028", "\x1c"])
def test_no_text_makes_the_turn_raise(text):
    for query in (text, text * 50, PROMPT + text, text + PROMPT):
        for prompt in (text, text * 50, PROMPT, PROMPT + text, None):
            assert isinstance(grade(assistant_turn(query, prompt), SOLUTION), KkGrade)


# ── OpenRLHF's contract ──


def test_imports_nothing_of_the_project():
    source = Path(kk_reward.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)) <= {*sys.stdlib_module_names, "torch"}


def test_reward_func_by_hand():
    answers = [ANSWER, WRONG_ANSWER, "no idea", "</answer>"]
    queries = [PROMPT + sampled(PROMPT, answer) for answer in answers]
    result = reward_func(queries, [PROMPT] * 4, [SOLUTION] * 4)
    assert result.keys() == {"rewards", "scores", "extra_logs"}
    expected = {
        "rewards": [1 + 2.0, 1 - 1.5, 1 - 2.0, -1 - 2.0],
        "scores": [1.0, 0.0, 0.0, 0.0],
        "well_formed": [1.0, 1.0, 1.0, 0.0],
        "answered": [1.0, 1.0, 0.0, 0.0],
    }
    flat = {"rewards": result["rewards"], "scores": result["scores"], **result["extra_logs"]}
    assert flat.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(flat[name], torch.tensor(values))  # (4,), float32


@pytest.mark.parametrize("lengths", [(1, 2, 1), (2, 1, 1), (1, 1, 0), (0, 1, 1)])
def test_unequal_lists_raise(lengths):
    queries, prompts, labels = ([text] * n for text, n in zip(("", "", SOLUTION), lengths, strict=True))
    with pytest.raises(ValueError, match="{}, {} and {} items".format(*lengths)):
        reward_func(queries, prompts, labels)


def test_threads_agree_with_one_thread():
    solutions = [f"(1) Zoey{'x' * i} is a knight\n(2) Oliver is a knave" for i in range(40)]
    calls = [([PROMPT + sampled(PROMPT, text)], [PROMPT], [label]) for label in solutions for text in (label, ANSWER)]
    alone = [reward_func(*call)["rewards"].item() for call in calls]
    kk_reward._people.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda call: reward_func(*call)["rewards"].item(), calls * 4))
    assert together == alone * 4
    assert set(alone) == {3.0, -1.0}
    assert reward_func(*calls[0])["rewards"].stride() == (1,)  # Ray sends no others


def test_reaches_the_experience_through_openrlhf():
    from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    class CharTokenizer:
        def __call__(self, text, add_special_tokens, return_tensors):
            return {"input_ids": torch.tensor([[ord(char) for char in text]])}

        def decode(self, tokens, skip_special_tokens):
            assert not skip_special_tokens
            return "".join(map(chr, tokens))

    class Engine:
        def __init__(self, response):
            self.response = response

        async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
            tokens = [ord(char) for char in self.response]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=None)])

    executor = SingleTurnAgentExecutor(kk_reward.__file__)
    assert "reward_func" not in sys.modules  # which the file has to do without

    def experience(answer: str, max_length: int) -> Experience:
        params = SimpleNamespace(max_tokens=200, logprobs=None)
        engine = Engine(sampled(PROMPT, answer))
        output = asyncio.run(executor.execute(PROMPT, SOLUTION, params, max_length, CharTokenizer(), engine))
        return SamplesGenerator._process_response_into_experience(None, output, max_len=max_length)

    # 300 leaves the prompt its last 100 characters.
    runs = [(ANSWER, 5000), (WRONG_ANSWER, 5000), ("no idea", 5000), (ANSWER, 300)]
    items = [experience(answer, max_length) for answer, max_length in runs]
    for item in items:
        assert item.rewards.shape == item.scores.shape == (1,)
        assert item.info["well_formed"].shape == item.info["answered"].shape == (1,)
    batch = Experience.concat_experiences(items, pad_token_id=0)
    assert batch.rewards.tolist() == [3.0, -0.5, -1.0, 3.0]
    assert batch.scores.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch.info["answered"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert batch.info["well_formed"].tolist() == [1.0, 1.0, 1.0, 1.0]
    again = make_experience_batch(split_experience_batch(batch))
    assert torch.equal(again.rewards, batch.rewards)
    assert [float(value) for value in again.info["answered"]] == [1.0, 1.0, 0.0, 1.0]


def test_an_agents_turns_add_up_to_what_the_last_one_earns():
    """A second one costs a point. A sample without room for it keeps what the first has earned."""
    agent = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "kk_agent.py"))["Puzzle"]

    def earned(*answers: str) -> float:
        puzzle, state = agent(), {"observation_text": "", "label": SOLUTION, "sampling_params": None}
        return sum(float(asyncio.run(puzzle.step(state | {"action_text": turn(a)}))["rewards"]) for a in answers)

    assert [earned(ANSWER), earned(WRONG_ANSWER, ANSWER), earned(WRONG_ANSWER, WRONG_ANSWER)] == [3.0, 2.0, -1.5]
    assert earned(WRONG_ANSWER) == -0.5
