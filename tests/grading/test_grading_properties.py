"""What holds of the graders for every response: they never raise, and agree with themselves."""

import json
import time

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.grading.grader import Limits, Refused
from arlopti_openrlhf.grading.math_units import split_unit, words
from arlopti_openrlhf.grading.server import read_request

SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"
KK_PIECES = ["<think>", "</think>", "<answer>", "</answer>", "Zoey", "Oliver", " is a ", "knight", "knave", "\n", "İı"]
MATH_PIECES = ["\\boxed{", "{", "}", "\\fbox{", "\\{", "\\", "$", "42", "\\text{ cm}", "\\frac", "^", "(", "=", "\\["]
TEXT = st.text(max_size=40)


def texts(pieces):
    return st.lists(st.one_of(st.sampled_from(pieces), TEXT), max_size=20).map("".join)


@given(texts(KK_PIECES))
def test_a_knights_and_knaves_grade_has_one_of_the_rules_rewards(response):
    grade = kk_reward.grade(response, SOLUTION)
    assert (grade.reward, grade.score) in [(3.0, 1.0), (-0.5, 0.0), (-1.0, 0.0), (-3.0, 0.0)]
    assert grade.well_formed == (grade.reward != -3) and grade.answered == (grade.reward in (3, -0.5))


@given(texts(KK_PIECES), texts([*KK_PIECES, "<|im_start|>assistant", "<think>"]))
def test_the_turn_is_the_response_where_the_query_starts_with_the_prompt(response, prompt):
    turn = kk_reward.assistant_turn(prompt + response, prompt)
    prefill = "<think>" if prompt.rstrip().endswith("<think>") else ""
    assert not prompt or turn.startswith(prefill) and turn.endswith(response)


@given(st.lists(texts(KK_PIECES), max_size=5))
def test_a_batch_is_graded_as_its_samples(responses):
    result = kk_reward.reward_func(responses, [None] * len(responses), [SOLUTION] * len(responses))
    alone = [kk_reward.reward_func([r], [None], [SOLUTION])["rewards"] for r in responses]
    assert torch.equal(result["rewards"], torch.cat([torch.empty(0), *alone]))


def balanced():
    leaf = st.text(st.sampled_from("ab1+ \\{"), max_size=4).map(
        lambda text: text.replace("\\", "").replace("{", "\\{")
    )
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"))


@given(TEXT, balanced(), st.text(st.characters(exclude_characters="{}\\")))
def test_the_last_box_is_found_whatever_is_around_it(before, content, after):
    before = before.replace("\\", "")
    assert math_reward.last_box(f"{before}\\boxed{{{content}}}{after}") == content


@given(texts(MATH_PIECES))
def test_a_box_is_part_of_its_text(text):
    box = math_reward.last_box(text)
    assert box is None or f"{{{box}}}" in text


@given(texts([*MATH_PIECES, "\\text{ maybe}", " cm", "^2", "\\mathrm{m}", "/"]), st.sampled_from(["42", "42 cm"]))
def test_what_is_left_without_a_unit_has_none(answer, label):
    left, _ = split_unit(answer, words(label))
    assert split_unit(left, words(label)) == (left, frozenset())
    assert bool(left.strip()) == bool(answer.strip())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(texts([*MATH_PIECES, "\\text{ maybe}", "x = ", "!", "\\left(", "9^{9^{9^9}}"]), st.booleans())
def test_a_math_response_is_right_or_wrong_in_time(text, boxed):
    math_reward.worker_pool().start()
    start = time.monotonic()
    grade = math_reward.grade(f"\\boxed{{{text}}}" if boxed else text, "42")
    assert grade.score in (0.0, 1.0)
    assert time.monotonic() - start < math_reward.TIMEOUT + 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


@given(
    st.fixed_dictionaries({}, optional={name: JSON for name in ("query", "prompts", "labels")}) | JSON | st.binary()
)
def test_a_request_is_read_or_refused(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    try:
        query, prompts, labels = read_request(body, Limits())
    except Refused as refused:
        assert refused.status in (413, 422) and refused.message
    else:
        assert len(query) == len(prompts) == len(labels) > 0
        assert all(isinstance(text, str) for text in query)
