"""Labels that a right answer, as a person writes it, could not earn are found, and labels of any type are asked."""

import datetime
import decimal

import pytest

from arlopti_openrlhf.ops.preflight.data import unreadable_labels


@pytest.fixture(scope="module")
def problems():
    """What math cannot read of the labels below, by label."""
    labels = [*WITH_WORDS, *BARE, *OF_OTHER_TYPES, *REFUSED]
    found = unreadable_labels("math", [(str(i), label) for i, label in enumerate(labels)])
    return {labels[int(where)]: (problem, is_fatal) for where, problem, is_fatal in found}


WITH_WORDS = {  # unless the grader itself reads them
    "approximately 3.14": "3.14",
    "about 12 minutes": "12 minutes",
    "5 (five)": "5",
    "Answer: C": "C",
    "the final answer is 7": "7",
    r"$\frac12$ or $0.5$": r"\frac12",
    "~5": "5",
}
BARE = ["3.14", "C", "x=1 or x=2", "1 or 2", "f(x)", "Tuesday", "(1,2)", r"\text{about}"]
OF_OTHER_TYPES = [decimal.Decimal("42.00"), decimal.Decimal("1E+2"), 2**62, 1.5]
REFUSED = [datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), b"42", None, decimal.Decimal("NaN")]


@pytest.mark.parametrize("label", WITH_WORDS)
def test_a_label_with_words_around_the_answer(problems, label):
    from arlopti_openrlhf.grading import math_reward

    if math_reward.grade(f"\\boxed{{{WITH_WORDS[label]}}}", label).score:
        assert label not in problems
    else:
        problem = f"{label!r} is met by these words only, and not by {WITH_WORDS[label]!r}"
        assert problems[label] == (problem, False)


@pytest.mark.parametrize("label", [*BARE, *OF_OTHER_TYPES], ids=str)
def test_a_label_that_is_an_answer(problems, label):
    assert label not in problems


@pytest.mark.parametrize("label", REFUSED, ids=lambda label: type(label).__name__)
def test_a_label_of_a_type_that_the_run_refuses(problems, label):
    problem, is_fatal = problems[label]
    assert is_fatal and f"({type(label).__name__})" in problem


def test_a_decimal_is_graded_by_its_value():
    from arlopti_openrlhf.grading.math_reward import grade

    label = decimal.Decimal("3.50")
    assert [grade(f"\\boxed{{{answer}}}", label).score for answer in ("3.5", "7/2", "3.51")] == [1, 1, 0]
    assert grade("\\boxed{42}", decimal.Decimal("42.00")).score == 1
