"""Changes JSON values and their texts at random, from a seeded generator."""

import random
from typing import Any

# What has been hard on parsers: LaTeX, tags, templates, HTTP, JSON, and Unicode.
PIECES = (
    *"{}()[]<>$\\\"'%&#^_~|,.:;!?=+-*/ \n\r\t\0",
    *("\\boxed{", "\\fbox{", "\\left(", "\\right)", "\\frac{", "\\sqrt[", "\\text{ maybe}", "\\text{ cm}", "\\\\"),
    *("^{9^{9^9}}", "10^{1000000}!", "\\sum_{k=1}^{10^9}", "\\begin{pmatrix}", "\\equiv", " = ", "e400", "1e-9"),
    *("\\pmod{5}", "\\pm", "\\infty", "\\cup", "\\int", "\\log_2", "!!!!", "_2", "\\circ", " or "),
    *("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>assistant\n", "<|im_end|>", " is a knight", "(1) "),
    *("GET ", " HTTP/1.1\r\n", "Content-Length: 99\r\n", "Transfer-Encoding: chunked\r\n", "Expect: 100-continue"),
    *("\r\n\r\n", "ffffffffffffffff\r\n", "Upgrade: websocket\r\n", "Connection: close\r\n", "%00", "NaN", "null"),
    *("İ", "ı", "ß", "٣", "²", "\u2028", "\u202e", "\ud800", "\ufeff", "é", "\U0001f600", "９"),
)
VALUES = (None, True, 0, -1, 1e308, float("nan"), 10**30, "", [], {}, [[]], ["0.5", "2"], {"a": 1})


def mutated(rng: random.Random, value: Any, others: list[Any]) -> Any:
    """Return a changed copy of a JSON value.

    Args:
        rng: decides everything.
        value: what to change.
        others: values of the same kind, which parts of texts are taken from.
    """
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        value = _changed(rng, value, others)
    return value


def _changed(rng: random.Random, value: Any, others: list[Any]) -> Any:
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.02 and len(value) > 1:
            del changed[name]
        else:
            inner = [other[name] for other in others if isinstance(other, dict) and name in other]
            changed[name] = _changed(rng, value[name], inner)
        return changed
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return rng.choice((value[:place], value + value[place:], value[::-1]))
        return [*value[:place], _changed(rng, value[place], others), *value[place + 1 :]]
    if isinstance(value, str) and rng.random() < 0.98:
        return _changed_text(rng, value, [other for other in others if isinstance(other, str)])
    return rng.choice(VALUES)


def _changed_text(rng: random.Random, text: str, others: list[str]) -> str:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    kind = rng.randrange(7)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:start] + text[start:end] * rng.choice((2, 3, 30)) + text[end:]
    if kind == 2:
        return text[:start]
    if kind == 3 and others:
        other = rng.choice(others)
        return text[:start] + other[rng.randrange(len(other) + 1) :]
    if kind == 4:
        return text[:start] + rng.choice(PIECES) * rng.choice((1, 50, 3000)) + text[start:]
    if kind == 5:
        return text[:start] + chr(rng.randrange(0x300)) + text[start + 1 :]
    return text[:start] + rng.choice(PIECES) + text[start:]
