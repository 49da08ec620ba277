r"""Asks a source of rewards about a wrong answer and about right ones.

What is right is known to the source alone, so a right answer is a label in some frame: `\boxed{LABEL}`, say. A source
that gives none of the frames more than a wrong answer may never reward anything.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from arlopti_openrlhf.grading.reward_answers import normalise

WRONG = "I do not know."
FRAMES = r'`\boxed{LABEL}`, `<answer>LABEL</answer>`, "The answer is LABEL." and the label itself'
# What functions of TRL and verl call their arguments. OpenRLHF passes its own three, by place.
_FOREIGN = {"completion", "completions", "solution_str", "ground_truth"}
_OURS = ("the queries (prompts with their answers)", "the prompts", "the labels")


class Refused(Exception):
    """The source has no reward for an answer. The message says why, in one line."""


class Row(NamedTuple):
    """A prompt as vLLM gets it, with its label as it is in the data."""

    prompt: str
    label: Any


# Returns what a source answers for a query, its prompt and its label. Refused where it has no answer.
Ask = Callable[[str, str, Any], Any]


def unrewarded(ask: Ask, rows: Sequence[tuple[str, Any]]) -> str | None:
    """Return in one line that a source rewards no right answer to some of the rows, or None.

    All answers are asked for at a time, as a run does.

    Raises:
        Refused: an answer has no reward.
    """
    asked = [Row(*row) for row in rows]
    wrong = _values(ask, asked, [[WRONG] for _ in asked])
    asked_right = [_right(row) for row in asked]
    right = _values(ask, asked, asked_right)
    tried = [i for i, responses in enumerate(asked_right) if responses]
    missed = [i for i in tried if max(right[i]) <= wrong[i][0]]
    if not missed:
        return None
    problem = (
        f"no right answer to {len(missed)} of the first {len(tried)} rows scores above a wrong one, "
        f"first for the label {_short(asked[missed[0]].label)}; tried {FRAMES}"
    )
    values = {value for i in tried for value in (*right[i], *wrong[i])}
    return problem + (f". All of them earned {min(values):g}, as did the wrong one" if len(values) == 1 else "")


def foreign_parameters(parameters: Sequence[str]) -> str | None:
    """Return what a function gets whose parameters have other frameworks' names, or None."""
    if not _FOREIGN.intersection(parameters):
        return None
    got = ", ".join(f"`{name}` gets {ours}" for name, ours in zip(parameters, _OURS, strict=False))
    return f"It is called as reward_func(queries, prompts, labels): {got}"


def _values(ask: Ask, rows: Sequence[Row], responses: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return what each row's responses earn: their scores if the source gives them, else their rewards."""

    def value(row: Row, response: str) -> float:
        about = f"for the label {_short(row.label)}"
        about += f" and the answer {response[:60]!r}" if response != WRONG else ""
        try:
            answer = normalise(ask(row.prompt + response, row.prompt, row.label), 1)
        except ValueError as error:
            raise Refused(f"reward_func returned {error} {about}") from None
        except Refused as error:
            raise Refused(f"{error} {about}") from None
        [number] = answer["rewards"] if answer["scores"] is None else answer["scores"]
        return number

    with ThreadPoolExecutor(max(1, sum(map(len, responses)))) as threads:
        asked = [
            [threads.submit(value, row, response) for response in each]
            for row, each in zip(rows, responses, strict=True)
        ]
        return [[future.result() for future in each] for each in asked]


def _right(row: Row) -> list[str]:
    """Return right answers to a row with a label, after the thinking that some prompts begin and some rewards want."""
    text = _answer_text(row.label)
    if not text:
        return []
    closing = "\n</think>\n" if row.prompt.rstrip().endswith("<think>") else ""
    thought = closing or "<think>\n</think>\n"
    boxed = f"\\boxed{{{text}}}"
    bare = [boxed, f"The answer is {text}.", text]
    return [thought + boxed, f"{thought}<answer>{text}</answer>", *(closing + each for each in bare)]


def _answer_text(label: Any) -> str:
    """Return the answer in a label: the first of alternatives, `ground_truth` of verl, the end of GSM8K's."""
    if isinstance(label, str) and label.lstrip().startswith(('["', '{"')):
        try:
            label = json.loads(label)
        except ValueError:
            pass  # a label that merely begins so
    if isinstance(label, dict):
        label = label.get("ground_truth", label)
    if isinstance(label, list | tuple):
        label = label[0] if label else None
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    return "" if label is None else str(label).rpartition("####")[2].strip()


def _short(label: Any) -> str:
    return repr(str(label)[:60])
