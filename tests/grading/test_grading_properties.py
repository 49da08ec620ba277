"""What holds of the graders for every response: they never raise, and agree with themselves."""

import json
import re
import time
from fractions import Fraction

import torch
from arlopti_testing.changed_inputs import VALUES, changed, with_other_values
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.grading.grader import Limits, Refused
from arlopti_openrlhf.grading.math_units import split_unit, words
from arlopti_openrlhf.grading.server import read_request

SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"
TURN = f"<think>If Zoey is a knave, ...</think>\n<answer>{SOLUTION}</answer><|im_end|>"
PROMPT = "<|im_start|>user\nWho is a knave?<|im_end|>\n<|im_start|>assistant\n<think>"
KK_PIECES = ["<think>", "</think>", "<answer>", "</answer>", "Zoey", "Oliver", " is a ", "knight", "knave", "\n", "İı"]
MATH_PIECES = ["\\boxed{", "{", "}", "\\fbox{", "\\{", "\\", "$", "42", "\\text{ cm}", "\\frac", "^", "(", "=", "\\["]
TEXT = st.text(max_size=40)
# Answers that are right, and their labels.
MATH = [
    ("\\frac{14}{3}", "14/3"),
    ("x = 42 \\text{ cm}", "42"),
    ("(-\\infty, 2] \\cup \\{3, \\sqrt{5}\\}", "(-\\infty, 2] \\cup \\{\\sqrt{5}, 3\\}"),
    ("8.7 \\times 10^{8}", ["870000000", "8.7e8"]),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("17 \\equiv 2 \\pmod{5}, \\quad 50\\%", "2, \\frac{1}{2}"),
]
# Comparisons may take seconds, so there are fewer of them.
FEWER = settings(max_examples=settings().max_examples * 2 // 5, suppress_health_check=[HealthCheck.too_slow])


def texts(pieces):
    return st.lists(st.one_of(st.sampled_from(pieces), TEXT), max_size=20).map("".join)


@given(texts(KK_PIECES) | changed(TURN))
def test_a_knights_and_knaves_grade_has_one_of_the_rules_rewards(response):
    grade = kk_reward.grade(response, SOLUTION)
    assert (grade.reward, grade.score) in [(3.0, 1.0), (-0.5, 0.0), (-1.0, 0.0), (-3.0, 0.0)]
    assert grade.well_formed == (grade.reward != -3) and grade.answered == (grade.reward in (3, -0.5))


@given(texts(KK_PIECES) | changed(TURN), texts([*KK_PIECES, "<|im_start|>assistant", "<think>"]) | changed(PROMPT))
def test_the_turn_is_the_response_where_the_query_starts_with_the_prompt(response, prompt):
    turn = kk_reward.assistant_turn(prompt + response, prompt)
    prefill = {"<think>": "<think>", "</think>": "<think></think>"}.get(re.split("(?=<)", prompt.rstrip())[-1], "")
    assert not prompt or turn.startswith(prefill) and turn.endswith(response)
    assert isinstance(kk_reward.assistant_turn(response, prompt), str)  # of a query that does not start so


@given(st.lists(texts(KK_PIECES), max_size=5))
def test_a_batch_is_graded_as_its_samples(responses):
    result = kk_reward.reward_func(responses, [None] * len(responses), [SOLUTION] * len(responses), unknown=1)
    alone = [kk_reward.reward_func([r], [None], [SOLUTION])["rewards"] for r in responses]
    assert torch.equal(result["rewards"], torch.cat([torch.empty(0), *alone]))
    for column in (result["scores"], *result["extra_logs"].values()):
        assert column.shape == (len(responses),) and column.dtype == torch.float32


def balanced():
    leaf = st.text(st.sampled_from("ab1+ \\{"), max_size=4).map(
        lambda text: text.replace("\\", "").replace("{", "\\{")
    )
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"))


@given(TEXT, balanced(), st.text(st.characters(exclude_characters="{}\\")))
def test_the_last_box_is_found_whatever_is_around_it(before, content, after):
    before = before.replace("\\", "")
    box = math_reward.last_box(f"{before}\\boxed{{{content}}}{after}")
    assert box == (content if content.strip("{} ") else None)  # an empty box is none


@given(texts(MATH_PIECES))
def test_a_box_is_part_of_its_text(text):
    box = math_reward.last_box(text)
    assert not box or f"{{{box}}}" in text


@example("/ cm", "42")
@given(texts([*MATH_PIECES, "\\text{ maybe}", " cm", "^2", "\\mathrm{m}", "/"]), st.sampled_from(["42", "42 cm"]))
def test_what_is_left_without_a_unit_has_none(answer, label):
    left, _ = split_unit(answer, words(label))
    assert split_unit(left, words(label)) == (left, frozenset())
    assert bool(left.strip()) == bool(answer.strip())


@FEWER
@given(texts([*MATH_PIECES, "\\text{ maybe}", "x = ", "!", "\\left(", "9^{9^{9^9}}"]), st.booleans())
def test_a_math_response_is_right_or_wrong_in_time(text, boxed):
    math_reward.worker_pool().start()
    start = time.monotonic()
    grade = math_reward.grade(f"\\boxed{{{text}}}" if boxed else text, "42")
    assert grade.score in (0.0, 1.0)
    assert time.monotonic() - start < math_reward.TIMEOUT + 8


@FEWER
@given(st.data(), st.sampled_from(MATH))
def test_a_changed_answer_is_right_or_wrong_in_time(data, pair):
    response = data.draw(changed(f"So it is \\boxed{{{pair[0]}}}."))
    start = time.monotonic()
    assert math_reward.grade(response, pair[1]).score in (0.0, 1.0)
    assert time.monotonic() - start < math_reward.TIMEOUT + 8


def as_fraction(value):
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' * (value < 0)}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def as_mixed(value):
    whole, rest = divmod(abs(value), 1)
    return f"{'-' * (value < 0)}{whole}{as_fraction(rest)}" if whole and rest else as_fraction(value)


def as_decimal(value):
    """Return the decimals of a value, with those that repeat under a line."""
    whole, rest = divmod(abs(value.numerator), value.denominator)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    if rest:
        digits = f"{digits[: seen[rest]]}\\overline{{{digits[seen[rest] :]}}}"
    return f"{'-' * (value < 0)}{whole}{'.' * bool(digits)}{digits}"


NO_CHANGES = ["", "\\text{ cm}", "\\ \\mathrm{m}/\\mathrm{s}^2", "\\text{ ordered pairs}"]
OTHER_VALUES = ["\\text{ thousand}", "\\text{ maybe}", "\\pi"]


@FEWER
@given(st.data(), st.integers(-400, 400), st.sampled_from([1, 2, 3, 7, 8, 12, 40]))
def test_an_answer_is_right_where_its_value_is_the_labels(data, numerator, denominator):
    label = Fraction(numerator, denominator)
    mistakes = [-label, label + 1, label * 10, label / 2, Fraction(1) / (label or 1), label + Fraction(1, 1000)]
    answer = data.draw(st.just(label) | st.sampled_from(mistakes))
    text = data.draw(st.sampled_from([as_fraction, str, as_mixed, as_decimal]))(answer)
    # No variable stands right behind a fraction, where it might belong to the denominator.
    others = [*OTHER_VALUES, *(["x", "^2 + 7"] if answer and text.isdigit() else [])]
    added = data.draw(st.sampled_from(NO_CHANGES) | st.sampled_from(others))
    before = data.draw(st.sampled_from(["", "x = ", "= ", "m + n = ", "\\approx ", "f(2) = "]))
    boxes = ["\\boxed{%s}", "So it is $\\boxed{%s}$.", "\\[ \\boxed{ %s } \\]", "\\boxed{1}, no: \\boxed{%s}"]
    grade = math_reward.grade(data.draw(st.sampled_from(boxes)) % (before + text + added), as_fraction(label))
    changes_nothing = added in NO_CHANGES or answer == 0  # which all of the others multiply
    assert grade.timed_out or grade.score == (answer == label and changes_nothing)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


FIELDS = ("query", "prompts", "labels")
GOOD = st.lists(st.tuples(TEXT, st.none() | TEXT, JSON), min_size=1, max_size=3).map(
    lambda rows: dict(zip(FIELDS, map(list, zip(*rows, strict=True)), strict=True))
)


@given(
    st.fixed_dictionaries({}, optional={name: JSON | st.lists(TEXT) for name in FIELDS})
    | GOOD.flatmap(with_other_values)
    | (JSON | st.sampled_from(VALUES))
    | st.binary()
)
def test_a_request_is_read_or_refused(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    columns = [message.get(name) for name in FIELDS] if isinstance(message, dict) else [None]
    is_good = all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns)
    is_good = is_good and all(isinstance(text, str) for text in columns[0])
    is_good = is_good and all(isinstance(text, str | None) for text in columns[1])
    try:
        query, prompts, labels = read_request(body, Limits())
    except Refused as refused:
        assert refused.status in (413, 422) and refused.message and not is_good
    else:
        assert is_good and [len(query)] * 2 == [len(prompts), len(labels)]
