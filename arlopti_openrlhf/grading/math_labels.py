"""Reads the labels of math, and tells which of them the answers that people write would not meet."""

import re
from collections.abc import Sequence
from typing import Any

from arlopti_openrlhf.grading.math_reward import grade, is_readable
from arlopti_openrlhf.grading.math_reward import label_text as label_text

# Words around an answer, which a model will not write around its own.
_BEFORE = re.compile(
    r"(?:(?:the\s+)?(?:final\s+)?(?:answer|ans|solution|result)\s*(?::|=|\bis\b)"
    r"|(?:approximately|approx\.?|about|around|roughly|nearly|almost|circa)\b|[~≈])\s*",
    re.IGNORECASE,
)
_GLOSS = re.compile(r"\s+\([A-Za-z][A-Za-z -]{2,}\)$")
_OR = re.compile(r"\s+or\s+|\s*\\text\{\s*or\s*\}\s*")


def problem(label: Any) -> str | None:
    """Return why only the label's own words, or letters, earn it, or None. ValueError as in `label_text`."""
    answers = _answers_in(label_text(label))
    if answers and not _earns(label, answers):
        return f"{str(label)[:60]!r} is met by these words only, and not by {answers[0]!r}"
    return None if is_readable(label) else f"{str(label)[:60]!r} is compared letter by letter"


def _is_right(answer: str, label: Any) -> bool:
    return grade(f"\\boxed{{{answer}}}", label).score > 0


def _earns(label: Any, answers: Sequence[str]) -> bool:
    if any(_is_right(answer, label) for answer in answers):
        return True
    # "1 or 2" may name two solutions, while "1/2 or 0.5" names one.
    return not _is_right(answers[0], answers[-1]) and _is_right(", ".join(answers), label)


def _answers_in(label: str) -> list[str]:
    """Return what a person would answer to a label with words around its answer: a hedge, a gloss, alternatives."""
    bare = _GLOSS.sub("", _BEFORE.sub("", label, count=1) if _BEFORE.match(label) else label)
    answers = [answer for part in _OR.split(bare) if (answer := part.strip(" $"))]
    return answers if len(answers) > 1 or bare != label else []
