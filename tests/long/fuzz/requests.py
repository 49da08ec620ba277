"""Malformed requests to the reward server, and what it has to answer to them: a refusal, or the right rewards."""

import itertools
import json
from typing import Any

from arlopti_openrlhf.grading import kk_reward, math_reward

GRADERS = {"kk": kk_reward.reward_func, "math": math_reward.reward_func}
_FIELDS = ("query", "prompts", "labels")
# What stands in place of a message, of one of its lists, or of an item in it.
_WRONG = (
    *(None, True, 0, -1.5, 1e308, float("nan"), float("-inf"), 10**400, "", "text", "\ud800", "\0", "x" * 100_000),
    *([], [None], [[]], ["a", "b"], [1, "2"], {}, {"query": ["a"]}, [[["deep"] * 3] * 3], {"0": "a", "1": "b"}),
)
_NO_JSON = (
    *("", " ", "{", "[", "nul", "{}{}", "[]]", '{"query":', '{"query": ["a"],}', "{'query': ['a']}", "\ufeff{}", "\0"),
    *(
        "[" * 100_000,
        '{"a":' * 50_000,
        "9" * 5000,
        '"\\ud800',
        '"\\x"',
        "NaN",
        "-Infinity",
        "<html>",
        "query=a&labels=b",
    ),
)


class WrongAnswer(Exception):
    """Says what the server answered, and what was due."""


def battery(query: str, prompt: str, label: str) -> list[dict]:
    """Return requests that differ from a good one in one place, for both graders, and bodies that are no JSON.

    Args:
        query, prompt, label: a sample that both graders can read.
    """
    good = {"query": [query] * 2, "prompts": [prompt, None], "labels": [label] * 2}
    messages: list[Any] = [good, {name: values[:1] for name, values in good.items()}, *_WRONG]
    for field in _FIELDS:
        messages.append({name: values for name, values in good.items() if name != field})
        messages.append({f" {name}" if name == field else name: values for name, values in good.items()})
        messages += [good | {field: wrong} for wrong in _WRONG]
        messages += [good | {field: [good[field][0], wrong]} for wrong in _WRONG]
        messages += [good | {field: good[field] * times} for times in (0, 2, 2049)]
    messages += [{name: [] for name in _FIELDS}, good | {"more": 1}]
    messages.append({name: values * 2049 for name, values in good.items()})
    cases = [{"grader": name, "message": message} for name, message in itertools.product(GRADERS, messages)]
    return cases + [{"grader": "kk", "body": body} for body in _NO_JSON]


def as_http(case: dict) -> bytes | None:
    """Return the bytes of a request, or None where the case is none."""
    if case.get("grader") not in list(GRADERS) or not isinstance(case.get("body", ""), str):
        return None
    body = _body(case)
    head = f"POST /{case['grader']}/get_reward HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def check(case: dict, answer: bytes) -> None:
    """Compare the server's answer with what is due.

    Raises:
        WrongAnswer: it is another one, or none.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode(errors="replace")
    expected = _expected(case)
    if expected is None:
        if status not in ("413", "422") or not json.loads(body)["error"]:
            raise WrongAnswer(f"status {status} with {body[:200]!r}, where a refusal is due")
    elif status != "200" or json.loads(body) != expected:
        raise WrongAnswer(f"status {status} with {body[:200]!r}, where {str(expected)[:200]} is due")


def _body(case: dict) -> bytes:
    return (case["body"] if "body" in case else json.dumps(case.get("message"))).encode("utf-8", "surrogatepass")


def _expected(case: dict) -> dict | None:
    """Return what the server answers, out of the reward function itself, or None where it refuses."""
    try:
        message = json.loads(_body(case))
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    columns = [message.get(field) for field in _FIELDS]
    if not all(isinstance(column, list) and 0 < len(column) <= 4096 for column in columns):
        return None
    query, prompts, labels = columns
    if len({len(column) for column in columns}) > 1 or not all(isinstance(q, str) for q in query):
        return None
    if not all(isinstance(prompt, str | None) for prompt in prompts):
        return None
    try:
        answer = GRADERS[case["grader"]](query, prompts, labels)
    except ValueError:  # a label that the grader cannot read
        return None
    parts = {"rewards": answer["rewards"].tolist(), "scores": answer["scores"].tolist()}
    extra_logs = {name: values.tolist() for name, values in answer["extra_logs"].items()}
    if len(query) == 1:
        parts, extra_logs = ({name: v[0] for name, v in part.items()} for part in (parts, extra_logs))
    return parts | {"extra_logs": extra_logs}
