"""Grades requests with one reward function, in worker processes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.grading.runner import Died, Raised, TimedOut, WorkerPool


class Limits(NamedTuple):
    """Bounds on what the server takes on."""

    body_bytes: int = 64 * 2**20
    batch: int = 4096  # queries in one request
    queue: int = 16384  # queries that wait or are graded, per grader; above, 503
    # For one request, waiting included. OpenRLHF's client gives up after 180.
    seconds: float = 150.0
    grading_seconds: float = 30.0  # for one call of a reward function


class Refused(Exception):
    """The error that answers a request: the status, what is wrong, and the field."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Grader:
    """Grades requests with one reward function.

    Args:
        source: a reward of the package, or the path of a Python file with `reward_func(queries, prompts, labels)`.
        workers: how many calls run at a time.
        limits: the server's limits.
    """

    def __init__(self, source: str, workers: int, limits: Limits) -> None:
        self.limits = limits
        reward = REWARDS.get(source)
        if reward and reward.has_workers:  # with a limit for each answer
            self.pool = reward.module.worker_pool(workers)
            self.call: Callable = reward.module.reward_func
        else:
            path = Path(reward.path if reward else source).resolve()
            self.pool = WorkerPool(f"{path}:reward_func", workers, limits.grading_seconds)
            self.call = self.pool.call
        self.threads = ThreadPoolExecutor(workers, source)
        self.queued = 0  # queries that wait or are graded

    async def grade(self, query: list, prompts: list, labels: list) -> dict:
        """Return the reward function's answer for B samples, as `reward_answers.normalise` reads it.

        Raises:
            Refused: the queue is full (503), or the call failed (see `_as_refusal`).
        """
        if self.queued + len(query) > self.limits.queue:
            raise Refused(503, f"{self.queued} queries wait or are graded: try again later")
        self.queued += len(query)
        try:  # a request that takes too long is cancelled, and its call does not begin any more
            answer = await asyncio.wrap_future(self.threads.submit(self.call, query, prompts, labels))
        except Exception as error:
            raise _as_refusal(error) from error
        finally:
            self.queued -= len(query)
        try:
            return normalise(answer, len(query))
        except ValueError as error:
            raise Refused(422, f"reward_func returned {error}") from None


def _as_refusal(error: Exception) -> Refused:
    """Return 5xx where a second attempt may succeed, and 422 where it would end the same way."""
    if isinstance(error, TimedOut):
        return Refused(504, f"the reward function took too long: {error}")
    if isinstance(error, Died):
        return Refused(500, f"the reward function's process died: {error}")
    if isinstance(error, Raised):
        return Refused(422, f"the reward function raised: {str(error).splitlines()[0][:500]}")
    return Refused(422 if isinstance(error, ValueError) else 500, str(error)[:500] or type(error).__name__)
