"""A prompt as text, for the run and for its checks. It imports nothing heavy."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 80  # characters of a prompt's beginning, and of its end


def template_arguments(given: Iterable[str]) -> dict[str, Any]:
    """Return arguments of a chat template by their names. A value is JSON, as in `enable_thinking=false`, or text.

    Raises:
        ValueError: one has not the form NAME=VALUE.
    """
    values: dict[str, Any] = {}
    for argument in given:
        name, separator, text = argument.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"{argument} is not of the form NAME=VALUE, as in enable_thinking=false")
        values[name] = text
        with suppress(ValueError):
            values[name] = json.loads(text)
    return values


def with_arguments(tokenizer: Any, given: Iterable[str]) -> Any:
    """Return a tokenizer, or a processor, whose chat template gets these arguments, whoever renders by it."""
    if values := template_arguments(given):
        tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, **values)
    return tokenizer


def not_in_template(tokenizer: Any, given: Iterable[str]) -> Iterator[str]:
    """Yield the names of arguments that the chat template does not read, so that they would change nothing."""
    template = str(getattr(tokenizer, "chat_template", None))
    yield from (name for name in template_arguments(given) if name not in template)


def shown(prompt: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a prompt's tokens as text: how many there are, the first and the last characters, escaped."""
    ids = tokenizer(text=prompt, add_special_tokens=False, verbose=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if len(text) <= 2 * _SHOWN:
        return f"{len(ids)} tokens\n  {text!r}"
    return f"{len(ids)} tokens\n  begins {text[:_SHOWN]!r}\n  ends   {text[-_SHOWN:]!r}"
