"""Grades requests with one reward function, in worker processes. Small requests that wait share a call."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.grading.runner import Died, Raised, TimedOut, WorkerPool

# Queries of several requests that one call grades. The way to a worker and back costs more than grading. Shared, a
# request of 4,096 tokens takes 0.4 ms of processor time, else 0.85 (two busy cores, 64 connections, medians of three).
_SHARED = 64


class Limits(NamedTuple):
    """Bounds on what the server takes on."""

    body_bytes: int = 64 * 2**20
    batch: int = 4096  # queries in one request
    queue: int = 16384  # queries that wait, per grader; above, 503
    # For one request, waiting included. OpenRLHF's client gives up after 180.
    seconds: float = 150.0
    grading_seconds: float = 30.0  # for one call of a reward function


class Refused(Exception):
    """The error that answers a request: the status, what is wrong, and the field."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class _Job(NamedTuple):
    """A request's three lists, and where its answer goes."""

    columns: tuple[list, list, list]
    result: asyncio.Future

    @property
    def size(self) -> int:
        return len(self.columns[0])


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
        self.free = workers  # calls that may start
        self.waiting: deque[_Job] = deque()
        self.queued = 0  # queries in `waiting`

    async def grade(self, query: list, prompts: list, labels: list) -> dict:
        """Return the reward function's answer for B samples, as `reward_answers.normalise` reads it.

        Raises:
            Refused: the queue is full (503), or the call failed (see `_as_refusal`).
        """
        if self.queued + len(query) > self.limits.queue:
            raise Refused(503, f"{self.queued} queries are waiting: try again later")
        job = _Job((query, prompts, labels), asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.queued += job.size
        self._start_calls()
        return await job.result

    def _start_calls(self) -> None:
        while self.free > 0 and self.waiting:
            jobs = [self._next()]
            while self.waiting and sum(job.size for job in jobs) + self.waiting[0].size <= _SHARED:
                jobs.append(self._next())
            # The clients of some may have left.
            if present := [job for job in jobs if not job.result.done()]:
                self._start_call(present)

    def _next(self) -> _Job:
        job = self.waiting.popleft()
        self.queued -= job.size
        return job

    def _start_call(self, jobs: list[_Job]) -> None:
        self.free -= 1
        lists: list[list] = [[value for job in jobs for value in job.columns[i]] for i in range(3)]
        call = asyncio.wrap_future(self.threads.submit(self.call, *lists))
        call.add_done_callback(partial(self._answer, jobs))

    def _answer(self, jobs: list[_Job], call: asyncio.Future) -> None:
        """Give each job its part of a call's answer."""
        self.free += 1
        try:
            answer = _normalised(call.result(), sum(job.size for job in jobs))
        except Exception as error:
            if len(jobs) > 1:  # each alone, so only the culprit fails
                for job in jobs:
                    self._start_call([job])
            elif not jobs[0].result.done():
                jobs[0].result.set_exception(_as_refusal(error))
        else:
            start = 0
            for job in jobs:
                part = slice(start, start + job.size)
                start = part.stop
                if not job.result.done():
                    job.result.set_result(_cut(answer, part))
        self._start_calls()


def _normalised(answer: object, n: int) -> dict:
    try:
        return normalise(answer, n)
    except ValueError as error:
        raise ValueError(f"reward_func returned {error}") from None


def _cut(answer: dict, part: slice) -> dict:
    scores = answer["scores"]
    return {
        "rewards": answer["rewards"][part],
        "scores": None if scores is None else scores[part],
        "extra_logs": {name: values[part] for name, values in answer["extra_logs"].items()},
    }


def _as_refusal(error: Exception) -> Refused:
    """Return 5xx where a second attempt may succeed, and 422 where it would end the same way."""
    if isinstance(error, TimedOut):
        return Refused(504, f"the reward function took too long: {error}")
    if isinstance(error, Died):
        return Refused(500, f"the reward function's process died: {error}")
    if isinstance(error, Raised):
        return Refused(422, f"the reward function raised: {str(error).splitlines()[0][:500]}")
    return Refused(422 if isinstance(error, ValueError) else 500, str(error)[:500] or type(error).__name__)
