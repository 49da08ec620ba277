"""Asks a function in a process that can be killed (`grading.worker_pool`), and our graders about labels."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool

NO_ANSWER = (TimedOut, Died, Raised, RuntimeError)  # RuntimeError: the function cannot be loaded
_UNLIMITED = 2.0**20  # GiB

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
