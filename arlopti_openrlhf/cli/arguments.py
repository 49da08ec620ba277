"""Argparse types for numbers in a range. They refuse a value in one line that names the value and the range."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from arlopti_openrlhf.ops.preflight import values
from arlopti_openrlhf.ops.rollouts import prompt_text

Number = TypeVar("Number", int, float)


def integer(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `minimum`."""
    return _type(int, f"[{minimum}, inf)", f"an integer of at least {minimum}")


def number(range_: str) -> Callable[[str], float]:
    """Return an argparse type for numbers in a range such as "(0, 1]"."""
    return _type(float, range_, f"a number in {range_}")


def template_argument(text: str) -> str:
    """Refuse an argument of a chat template that has not the form NAME=VALUE."""
    try:
        prompt_text.template_arguments([text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _type(kind: type[Number], range_: str, description: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        with suppress(ValueError):
            value = kind(text)
            if values.contains(range_, value):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {description}")

    return parse
