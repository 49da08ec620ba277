"""Make argparse types for numbers in a range. They refuse a value in one line that names the value and the range."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from arlopti_openrlhf.ops.preflight import values

Number = TypeVar("Number", int, float)


def integer(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `minimum`."""
    return _parser(int, lambda value: value >= minimum, f"an integer of at least {minimum}")


def number(range_: str) -> Callable[[str], float]:
    """Return an argparse type for numbers in a range such as "(0, 1]"."""
    return _parser(float, lambda value: values.contains(range_, value), f"a number in {range_}")


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """Return an argparse type for values above 0 of `kind`, which is `int` or `float`."""
    name = "an integer" if kind is int else "a number"
    return _parser(kind, lambda value: 0 < value < math.inf, f"{name} above 0")


def _parser(kind: type[Number], is_valid: Callable[[Number], bool], description: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        refused = argparse.ArgumentTypeError(f"{text} is not {description}")
        try:
            value = kind(text)
        except ValueError:
            raise refused from None
        # NaN is in no range, since every comparison with it is false.
        if not is_valid(value):
            raise refused
        return value

    return parse
