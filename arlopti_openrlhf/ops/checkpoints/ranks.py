"""Keeps the ranks of a model together where one of them may fail."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.lifecycle.stopping import RunStopped

T = TypeVar("T")


def everywhere(do: Callable[[], T]) -> list[T]:
    """Return what `do` returns on each rank, on every rank. All ranks have to call it.

    An error on one rank is raised on all, so no rank enters a collective call in which the others are missing.

    Raises:
        RunStopped, OSError: `do` raised it on some rank.
        RuntimeError: `do` raised anything else.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        value = do()
    except RunStopped as error:
        failure = error
    except OSError as error:
        failure = OSError(str(error))  # some subclasses cannot be pickled
    except Exception as error:
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, failure))
    for _, raised in answers:
        if raised:
            raise raised
    return [answer for answer, _ in answers]


def on_rank_0(do: Callable[[], T]) -> T:
    """Return what `do` returns on rank 0, on every rank. An error is raised on all."""
    answers: list[Any] = everywhere(lambda: do() if dist.get_rank() == 0 else None)
    return answers[0]


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        terminal.say(line)
