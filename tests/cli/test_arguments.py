"""Number types accept their range. Their errors name the value and the range."""

import argparse
import math

import pytest

from arlopti_openrlhf.cli.arguments import integer, number


@pytest.mark.parametrize(
    ("parse", "accepted"),
    [
        (integer(0), {"0": 0, "12": 12}),
        (number("(0, 1)"), {"0.5": 0.5, "1e-9": 1e-9}),
        (number("[0, 1]"), {"0": 0.0, "1": 1.0}),
        (number("[0, inf]"), {"0": 0.0, "inf": math.inf}),
    ],
)
def test_accepts_its_range(parse, accepted):
    assert {text: parse(text) for text in accepted} == accepted


@pytest.mark.parametrize(
    ("parse", "refused", "description"),
    [
        (integer(2), ("1", "-2", "2.5", "two", ""), "an integer of at least 2"),
        (number("(0, 1)"), ("0", "1", "nan", "x"), "a number in (0, 1)"),
        (number("(0, 1]"), ("0", "1.01", "nan"), "a number in (0, 1]"),
        (number("[0, 1]"), ("-0.1", "1.01", "nan", "x"), "a number in [0, 1]"),
        (number("(0, inf)"), ("0", "-1", "inf", "nan"), "a number in (0, inf)"),
    ],
)
def test_refuses_the_rest_and_says_which(parse, refused, description):
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            parse(text)
        assert str(error.value) == f"{text} is not {description}"
