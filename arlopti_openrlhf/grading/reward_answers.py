"""Reads what a reward function or server answers, in every form that users write, and writes what a server is asked.

This is the one reading: of the run, for a function and for a server, of the pre-flight, and of our own server. A
function's answer passes through JSON before, since the function runs in a process of its own each time.
"""

import datetime
import decimal
import inspect
import json
import math
from typing import Any, NamedTuple

# What our own server calls itself at /health, by which the pre-flight knows it from any other.
SERVER = "arlopti_openrlhf"


def to_json(value: Any) -> str:
    """Return a value as JSON. Tensors and arrays become lists, and what JSON does not know becomes its text.

    Raises:
        TypeError: it is, or holds, what an `async def` returns.
    """

    def known(part: Any) -> Any:
        if inspect.iscoroutine(part):
            part.close()
            raise TypeError("it is async def, and nothing awaits it: make it a plain def that calls asyncio.run")
        return part.tolist() if hasattr(part, "tolist") else str(part)

    return json.dumps(value, default=known)


def request_body(query: str, prompt: str, label: Any) -> bytes:
    """Return what a server is asked for one sample, as JSON. A label that is a decimal or a date becomes its text.

    Raises:
        ValueError: the label is, or holds, something that has no such text, as bytes have none.
    """

    def text(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        if isinstance(value, decimal.Decimal | datetime.date | datetime.time):
            return str(value)
        raise ValueError(f"a label that is {type(value).__name__} cannot be sent to a server; store it as text")

    return json.dumps({"query": [query], "prompts": [prompt], "labels": [label]}, default=text).encode()


class Grade(NamedTuple):
    """What a reward says of one response."""

    reward: float
    score: float | None  # 1 right, 0 wrong. None where the reward returns no scores
    well_formed: bool | None  # the response has the form that the prompt asks for. None where the reward does not say


def grades(answer: Any, n: int) -> list[Grade]:
    """Return the grades in the answer for `n` samples. ValueError as in `normalise`."""
    found = normalise(answer, n)
    well_formed = found["extra_logs"].get("well_formed")
    forms = [None] * n if well_formed is None else map(bool, well_formed)
    return list(map(Grade, found["rewards"], found["scores"] or [None] * n, forms))


def normalise(answer: Any, n: int) -> dict[str, Any]:
    """Return the answer for `n` samples in one form.

    Args:
        answer: a dict with `rewards` and perhaps `scores` and `extra_logs`, or the rewards alone. Numbers for several
            samples are a list or a tensor of `n`; a number for one sample may also stand alone, or in nested lists.
        n: how many samples the answer is for.

    Returns:
        `rewards`, a list of `n` finite floats; `scores`, such a list or None where the answer has none; `extra_logs`,
        {name: list of `n` floats}.

    Raises:
        ValueError: the answer is anything else. The message begins with what it is, for "SOURCE returned ...".
    """
    parts = answer if isinstance(answer, dict) else {"rewards": answer}
    if parts.get("rewards") is None:
        raise ValueError(f"no dict with `rewards`, nor the rewards themselves, but {str(answer)[:200]}")
    scores, extra_logs = parts.get("scores"), parts.get("extra_logs") or {}
    if not isinstance(extra_logs, dict):
        raise ValueError(f"extra_logs that are no dict: {str(extra_logs)[:200]}")
    return {
        "rewards": _finite("rewards", parts["rewards"], n),
        "scores": None if scores is None else _finite("scores", scores, n),
        "extra_logs": {name: _numbers(name, values, n) for name, values in extra_logs.items()},
    }


def _finite(name: str, values: Any, n: int) -> list[float]:
    numbers = _numbers(name, values, n)
    if broken := [number for number in numbers if not math.isfinite(number)]:
        raise ValueError(f"{name} that are not finite: {broken[0]}")
    return numbers


def _numbers(name: str, values: Any, n: int) -> list[float]:
    listed = _plain(values)
    numbers = [_innermost(v) for v in listed] if isinstance(listed, list | tuple) and n != 1 else [_innermost(listed)]
    if len(numbers) != n or not all(isinstance(number, int | float) for number in numbers):
        samples, wanted = ("one sample", "one number") if n == 1 else (f"{n} samples", f"{n} numbers")
        raise ValueError(f"{name} for {samples} that are not {wanted}: {str(listed)[:200]}")
    try:
        return [float(number) for number in numbers]
    except OverflowError:
        raise ValueError(f"{name} that are not finite: a whole number above 1e308") from None


def _innermost(value: Any) -> Any:
    """Return what a list of one holds, however deep."""
    value = _plain(value)
    while isinstance(value, list | tuple) and len(value) == 1:
        value = _plain(value[0])
    return value


def _plain(value: Any) -> Any:
    """Return a tensor or an array as lists and numbers. PyTorch is not imported to know one."""
    return value.tolist() if hasattr(value, "tolist") else value
