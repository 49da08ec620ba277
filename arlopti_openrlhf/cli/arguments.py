"""Argparse types for numbers in a range. They refuse a value in one line that names the value and the range."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

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


TEMPLATE: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "NAME=VALUE", "type": template_argument}


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how `evaluate` and `analyze` read and render prompts, as in `arlopti train`."""
    for key, default in (("input_key", "prompt"), ("label_key", "label")):
        help_ = f"as in `arlopti train` (default: {default})"
        parser.add_argument(f"--data.{key}", dest=key, default=default, help=help_)
    help_ = "arguments of the model's chat template, as in `arlopti train`: enable_thinking=false"
    parser.add_argument("--data.chat_template_args", dest="chat_template_args", help=help_, **TEMPLATE)
    help_ = "a prompt that is text is a user's message, as in `arlopti train`; messages get the chat template always"
    parser.add_argument("--data.apply_chat_template", dest="is_message", action="store_true", help=help_)
    help_ = "what a prompt that is text is put into, at its {}, as in `arlopti train`"
    parser.add_argument("--data.input_template", dest="input_template", help=help_)


def template_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the chat template that the flags of `add_data_flags` give."""
    return prompt_text.template_arguments(args.chat_template_args)


def _type(kind: type[Number], range_: str, description: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        with suppress(ValueError):
            value = kind(text)
            if values.contains(range_, value):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {description}")

    return parse
