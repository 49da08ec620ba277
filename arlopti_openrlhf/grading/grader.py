"""Puts a reward function behind a queue: it runs in worker processes, and requests that wait share a call."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool

FIELDS = ("query", "prompts", "labels")
_COALESCED = 64  # queries of several requests that one call grades


class Limits(NamedTuple):
    """Bounds what the server takes on."""

    body_bytes: int = 64 * 2**20
    batch: int = 4096  # queries in one request
    queue: int = 16384  # queries that wait, per grader; above, 503
    # For one request, waiting included. OpenRLHF's client gives up after 180.
    seconds: float = 150.0
    grading_seconds: float = 30.0  # for one call of a reward function


class Refused(Exception):
    """Carries the error that answers a request: the status, what is wrong, and the field."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Grader:
    """Grades requests with one reward function.

    Args:
        name: the name in the URL.
        source: "kk", "math", or the path of a Python file with `reward_func(queries, prompts, labels)`.
        workers: how many calls run at a time.
        limits: the server's limits.
    """

    def __init__(self, name: str, source: str, workers: int, limits: Limits) -> None:
        self.name, self.workers, self.limits = name, workers, limits
        if source == "math":
            # The math reward has worker processes of its own, with a limit for each answer.
            from arlopti_openrlhf.grading import math_reward

            self.pool = math_reward.worker_pool(workers)
            threads = ThreadPoolExecutor(workers, "math")
            self.submit: Callable[..., Future] = lambda *call: threads.submit(math_reward.reward_func, *call)
        else:
            path = Path(REWARD_FILES.get(source, source)).resolve()
            self.pool = WorkerPool(f"{path}:reward_func", workers, limits.grading_seconds)
            self.submit = self.pool.submit
        self.waiting: deque[_Job] = deque()
        self.queued = 0  # queries in `waiting`
        self.wake = asyncio.Event()

    async def grade(self, query: list, prompts: list, labels: list) -> dict:
        """Return the reward function's answer for B samples, as `reward_answers.normalise` reads it.

        Raises:
            Refused: the queue is full (503), or the call failed (see `_as_refusal`).
        """
        if self.queued + len(query) > self.limits.queue:
            raise Refused(503, f"{self.queued} queries are waiting: try again later")
        job = _Job(query, prompts, labels, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.queued += len(query)
        self.wake.set()
        return await job.result

    async def work(self) -> None:
        """Grade what waits, without end. The server runs one such task per worker."""
        while True:
            while not self.waiting:
                self.wake.clear()
                await self.wake.wait()
            # Small requests share a call.
            jobs = [self._next()]
            while self.waiting and sum(len(j.query) for j in jobs) + len(self.waiting[0].query) <= _COALESCED:
                jobs.append(self._next())
            # The clients of some may have gone.
            jobs = [job for job in jobs if not job.result.done()]
            if len(jobs) > 1 and await self._grade_together(jobs):
                continue
            for job in jobs:
                await self._grade_alone(job)

    def _next(self) -> "_Job":
        job = self.waiting.popleft()
        self.queued -= len(job.query)
        return job

    async def _grade_together(self, jobs: "list[_Job]") -> bool:
        """Grade several requests in one call.

        Return False where it fails: then each is graded alone, and only the culprit fails.
        """
        columns = [[value for job in jobs for value in getattr(job, name)] for name in FIELDS]
        try:
            results = await self._call(*columns)
        except Exception:
            return False
        start = 0
        for job in jobs:
            part = slice(start, start + len(job.query))
            start = part.stop
            if not job.result.done():
                scores = results["scores"]
                job.result.set_result(
                    {
                        "rewards": results["rewards"][part],
                        "scores": None if scores is None else scores[part],
                        "extra_logs": {name: values[part] for name, values in results["extra_logs"].items()},
                    }
                )
        return True

    async def _grade_alone(self, job: "_Job") -> None:
        try:
            result = await self._call(job.query, job.prompts, job.labels)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(_as_refusal(error))
        else:
            if not job.result.done():
                job.result.set_result(result)

    async def _call(self, query: list, prompts: list, labels: list) -> dict:
        answer = await asyncio.wrap_future(self.submit(query, prompts, labels))
        try:
            return normalise(answer, len(query))
        except ValueError as error:
            raise ValueError(f"reward_func returned {error}") from None


class _Job(NamedTuple):
    query: list
    prompts: list
    labels: list
    result: asyncio.Future


def _as_refusal(error: Exception) -> Refused:
    """Return 5xx where a second attempt may succeed, and 422 where it would end the same way."""
    if isinstance(error, TimedOut):
        return Refused(504, f"the reward function took too long: {error}")
    if isinstance(error, Died):
        return Refused(500, f"the reward function's process died: {error}")
    if isinstance(error, Raised):
        return Refused(422, f"the reward function raised: {str(error).strip().splitlines()[-1][:500]}")
    return Refused(422 if isinstance(error, ValueError) else 500, str(error)[:500] or type(error).__name__)
