"""Asks a function, or our graders about labels, in a process that can be killed (`grading.worker_pool`)."""

import base64
import pickle
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool

NO_ANSWER = (TimedOut, Died, Raised, RuntimeError)  # RuntimeError: the function cannot be loaded
_UNLIMITED = 2.0**20  # GiB
# Words around an answer, which a model will not write around its own.
_BEFORE = re.compile(
    r"(?:(?:the\s+)?(?:final\s+)?(?:answer|ans|solution|result)\s*(?::|=|\bis\b)"
    r"|(?:approximately|approx\.?|about|around|roughly|nearly|almost|circa)\b|[~≈])\s*",
    re.IGNORECASE,
)
_GLOSS = re.compile(r"\s+\([A-Za-z][A-Za-z -]{2,}\)$")
_OR = re.compile(r"\s+or\s+|\s*\\text\{\s*or\s*\}\s*")

Labels = Sequence[tuple[str, Any]]  # where each stands, and the label


def ask(function: str, *args: Any, seconds: float) -> Any:
    """Return the result of a function "package.module:name" in a process of its own, which ends with the call.

    Raises:
        TimedOut, Died, Raised, RuntimeError: there is none (`NO_ANSWER`).
    """
    pool = WorkerPool(function, 1, seconds, memory_gib=_UNLIMITED)
    try:
        return pool.call(*args)
    finally:  # after a Ctrl-C, too. Otherwise Python would wait for the call before it ends
        pool.close()


def reason(error: Exception) -> str:
    """Return in words why there is no answer."""
    if isinstance(error, Died):
        return "its process ends"
    return f"{error}, imports included" if isinstance(error, TimedOut) else f"cannot be asked: {str(error)[-200:]}"


def ask_about_labels(grader: str, labels: Labels, seconds: float) -> list[tuple[str, str, bool]]:
    """Return `unreadable_labels`. math is asked in a process of its own, because it starts others, which end with it.

    Raises:
        TimedOut, Died, Raised, RuntimeError: there is no answer.
    """
    if grader == "kk":
        return unreadable_labels(grader, labels)
    pickled = base64.b64encode(pickle.dumps(labels)).decode()  # as in a run, where labels need not be JSON
    return ask(f"{__name__}:unreadable_pickled_labels", grader, pickled, seconds=seconds)


def unreadable_pickled_labels(grader: str, pickled: str) -> list[tuple[str, str, bool]]:
    """Return `unreadable_labels` of labels as `ask_about_labels` hands them on."""
    return unreadable_labels(grader, pickle.loads(base64.b64decode(pickled)))


def unreadable_labels(grader: str, labels: Labels) -> list[tuple[str, str, bool]]:
    """Return the labels that kk or math cannot read: where each stands, why, and whether the grader raises there.

    The math grader does not raise where a label can only be matched letter by letter, so no answer may earn it. Nor
    does it where the label has words around the answer, and the answer without them earns nothing.
    """
    from arlopti_openrlhf.grading import kk_reward, math_reward

    def is_right(answer: str, label: Any) -> bool:
        return math_reward.grade(f"\\boxed{{{answer}}}", label).score > 0

    def earns(label: Any, answers: Sequence[str]) -> bool:
        if any(is_right(answer, label) for answer in answers):
            return True
        # "1 or 2" may name two solutions, while "1/2 or 0.5" names one.
        return not is_right(answers[0], answers[-1]) and is_right(", ".join(answers), label)

    def problem_of(label: Any) -> tuple[str, bool] | None:
        try:
            if grader == "kk":
                kk_reward.grade("", label)
                return None
            text = math_reward.label_text(label)
            if not math_reward.is_readable(label):
                return f"{str(label)[:60]!r} is not recognised as an answer to itself", False
            answers = _answers_in(text)
            if answers and not earns(label, answers):
                return f"{str(label)[:60]!r} is met by these words only, and not by {answers[0]!r}", False
        except ValueError as error:
            return str(error), True
        return None

    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        problems = threads.map(problem_of, [label for _, label in labels])
        return [(where, *problem) for (where, _), problem in zip(labels, problems, strict=True) if problem]


def _answers_in(label: str) -> list[str]:
    """Return what a person would answer to a label with words around its answer: a hedge, a gloss, alternatives."""
    bare = _GLOSS.sub("", _BEFORE.sub("", label, count=1) if _BEFORE.match(label) else label)
    answers = [answer for part in _OR.split(bare) if (answer := part.strip(" $"))]
    return answers if len(answers) > 1 or bare != label else []
