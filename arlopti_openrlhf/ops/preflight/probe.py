"""Asks a function in a process that can be killed (`grading.runner`), and our graders about labels."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.runner import Died, TimedOut, WorkerPool

NO_ANSWER = RuntimeError
_UNLIMITED = 2.0**20  # GiB

Labels = Sequence[tuple[str, Any]]  # where each stands, and the label


def ask(function: str, *args: Any, seconds: float) -> Any:
    """Return the result of a function "package.module:name" in a process of its own, which ends with the call.

    Raises:
        RuntimeError: there is none (`NO_ANSWER`).
    """
    with closing(WorkerPool(function, 1, seconds, memory_gib=_UNLIMITED)) as pool:
        return pool.call(*args)


def reason(error: Exception) -> str:
    """Return in words why there is no answer."""
    if isinstance(error, Died):
        return "its process ends"
    return f"{error}, imports included" if isinstance(error, TimedOut) else f"cannot be asked: {str(error)[-200:]}"


def unreadable_labels(grader: str, labels: Labels) -> list[tuple[str, str, bool]]:
    """Return the labels that a grader cannot read: where each stands, why, and whether the grader raises there."""
    reward = REWARDS[grader]

    def problem_of(label: Any) -> tuple[str, bool] | None:
        try:
            reward.label_text(label)
            problem = reward.label_problem(label)
        except ValueError as error:
            return str(error), True
        return (problem, False) if problem else None

    with ThreadPoolExecutor() as threads:
        each = threads.map if reward.has_workers else map
        problems = each(problem_of, [label for _, label in labels])
        return [(where, *problem) for (where, _), problem in zip(labels, problems, strict=True) if problem]
