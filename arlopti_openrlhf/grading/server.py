"""A reward server for OpenRLHF: `--reward.remote_url http://host:port/get_reward`.

    POST /get_reward    {"query": [...], "prompts": [...], "labels": [...]}
    200                 {"rewards": ..., "scores": ..., "extra_logs": {NAME: ...}}

With several graders each also answers at /NAME/get_reward; the first one at /get_reward. The values of a single query
are numbers, as OpenRLHF 0.11.2's client needs them (it sends one query at a time, and would nest a list); those of
more are lists. Requests that wait are graded together, in worker processes that are killed at their time limit.
"""

import asyncio
import hmac
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool

FIELDS = ("query", "prompts", "labels")
_COALESCED = 64  # queries of several requests that are graded in one call
log = logging.getLogger("arlopti_openrlhf.rewards")


class Limits(NamedTuple):
    """What the server takes on."""

    body_bytes: int = 64 * 2**20
    batch: int = 4096  # queries in one request
    queue: int = 16384  # queries that wait, per grader; above, 503
    seconds: float = (
        150.0  # for one request, waiting included: less than the 180 after which OpenRLHF's client gives up
    )
    grading_seconds: float = 30.0  # for one call of a reward function


_DEFAULTS = Limits()


class Refused(Exception):
    """A request that is answered with an error: status, what is wrong, and the field."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Grader:
    """A reward function behind a queue.

    Args:
        name: as in the URL.
        source: "kk", "math", or the path of a Python file with `reward_func(queries, prompts, labels)`.
        workers: calls at a time.
        limits: the server's.
    """

    def __init__(self, name: str, source: str, workers: int, limits: Limits) -> None:
        self.name, self.workers, self.limits = name, workers, limits
        if source == "math":
            # It has worker processes of its own, with a limit for each answer.
            from arlopti_openrlhf.grading import math_reward

            self.pool = math_reward.worker_pool(workers)
            threads = ThreadPoolExecutor(workers, "math")
            self.submit: Callable[..., Future] = partial(threads.submit, math_reward.reward_func)
        else:
            function = "arlopti_openrlhf.grading.kk_reward" if source == "kk" else str(Path(source).resolve())
            self.pool = WorkerPool(f"{function}:reward_func", workers, limits.grading_seconds)
            self.submit = self.pool.submit
        self.waiting: deque[_Job] = deque()
        self.queued = 0  # queries in `waiting`
        self.wake = asyncio.Event()

    async def grade(self, query: list, prompts: list, labels: list) -> dict:
        """The reward function's result for B samples: `rewards` and `scores` of B numbers, `extra_logs` of such."""
        if self.queued + len(query) > self.limits.queue:
            raise Refused(503, f"{self.queued} queries are waiting: try again later")
        job = _Job(query, prompts, labels, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.queued += len(query)
        self.wake.set()
        return await job.result

    async def work(self) -> None:
        """Grades what waits, for ever; the server runs one of these per worker."""
        while True:
            while not self.waiting:
                self.wake.clear()
                await self.wake.wait()
            jobs = [self._next()]
            while self.waiting and sum(len(j.query) for j in jobs) + len(self.waiting[0].query) <= _COALESCED:
                jobs.append(self._next())
            jobs = [job for job in jobs if not job.result.done()]  # their clients have gone
            if len(jobs) > 1 and await self._grade_together(jobs):
                continue
            for job in jobs:
                try:
                    result = await self._call(job.query, job.prompts, job.labels)
                except Exception as error:
                    if not job.result.done():
                        job.result.set_exception(_as_refusal(error))
                else:
                    if not job.result.done():
                        job.result.set_result(result)

    def _next(self) -> "_Job":
        job = self.waiting.popleft()
        self.queued -= len(job.query)
        return job

    async def _grade_together(self, jobs: "list[_Job]") -> bool:
        """One call for several requests; where it fails, each is called on its own, so that one alone fails."""
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
                extra_logs = {name: values[part] for name, values in results["extra_logs"].items()}
                job.result.set_result(
                    {
                        "rewards": results["rewards"][part],
                        "scores": results["scores"][part],
                        "extra_logs": extra_logs,
                    }
                )
        return True

    async def _call(self, query: list, prompts: list, labels: list) -> dict:
        return _checked(await asyncio.wrap_future(self.submit(query, prompts, labels)), len(query))


class _Job(NamedTuple):
    query: list
    prompts: list
    labels: list
    result: asyncio.Future


def _checked(result: object, count: int) -> dict:
    """A reward function's result as lists of `count` finite numbers; ValueError where it is anything else."""
    if not isinstance(result, dict) or "rewards" not in result:
        raise ValueError(f"reward_func returned no dict with `rewards`, but {str(result)[:200]}")

    def numbers(name: str, values: object) -> list[float]:
        values = values.tolist() if hasattr(values, "tolist") else values
        values = values if isinstance(values, list | tuple) else [values]
        if len(values) != count or not all(isinstance(v, int | float) for v in values):
            raise ValueError(f"reward_func returned for {count} queries as {name}: {str(values)[:200]}")
        if not all(math.isfinite(v) for v in values):
            raise ValueError(f"reward_func returned a {name} that is not finite: {str(values)[:200]}")
        return [float(v) for v in values]

    rewards = numbers("rewards", result["rewards"])
    scores = result.get("scores")
    return {
        "rewards": rewards,
        "scores": rewards if scores is None else numbers("scores", scores),
        "extra_logs": {name: numbers(name, v) for name, v in (result.get("extra_logs") or {}).items()},
    }


def _as_refusal(error: Exception) -> Refused:
    """5xx where a second attempt may succeed; 422 where it would end the same way, and clients need not try."""
    if isinstance(error, TimedOut):
        return Refused(504, f"the reward function took too long: {error}")
    if isinstance(error, Died):
        return Refused(500, f"the reward function's process died: {error}")
    if isinstance(error, Raised):
        return Refused(422, f"the reward function raised: {str(error).strip().splitlines()[-1][:500]}")
    return Refused(422 if isinstance(error, ValueError) else 500, str(error)[:500] or type(error).__name__)


def read_request(body: bytes, limits: Limits) -> tuple[list, list, list]:
    """The three lists of a request.

    Raises:
        Refused: with status 413 or 422 and the field's name.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"the body is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise Refused(422, 'the body is not an object {"query": [...], "prompts": [...], "labels": [...]}')
    columns = []
    for field in FIELDS:
        values = message.get(field)
        if not isinstance(values, list):
            missing = "is missing" if field not in message else "is not a list"
            raise Refused(422, f"{field} {missing}", field)
        if len(values) > limits.batch:
            raise Refused(413, f"{field} has {len(values)} items, more than {limits.batch}", field)
        columns.append(values)
    query, prompts, labels = columns
    if not query:
        raise Refused(422, "query is empty", "query")
    for field, values in (("prompts", prompts), ("labels", labels)):
        if len(values) != len(query):
            raise Refused(422, f"{field} has {len(values)} items, query has {len(query)}", field)
    for field, values, types in (("query", query, str), ("prompts", prompts, str | None)):
        for i, value in enumerate(values):
            if not isinstance(value, types):
                raise Refused(422, f"{field}[{i}] is not text", f"{field}[{i}]")
    return query, prompts, labels


class _Metrics:
    """What /metrics tells."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("reward_requests", "Requests answered", ["grader", "status"], registry=self.registry)
        self.gradings = Counter("reward_gradings", "Queries graded", ["grader"], registry=self.registry)
        self.seconds = Histogram(
            "reward_request_seconds",
            "From the request's head to its answer",
            ["grader"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.queue = Gauge("reward_queue", "Queries that wait", ["grader"], registry=self.registry)
        self.timed_out = Gauge(
            "reward_grader_timeouts_total", "Calls ended at their time limit", ["grader"], registry=self.registry
        )
        self.died = Gauge(
            "reward_grader_deaths_total", "Grader processes replaced", ["grader"], registry=self.registry
        )

    def watch(self, grader: Grader) -> None:
        self.queue.labels(grader.name).set_function(lambda: grader.queued)
        self.timed_out.labels(grader.name).set_function(lambda: grader.pool.timed_out)
        self.died.labels(grader.name).set_function(lambda: grader.pool.died)


class RewardServer:
    """The handlers, and what they share.

    Args:
        sources: name in the URL -> "kk", "math" or the path of a Python file; the first answers at /get_reward too.
        workers: grader processes, per grader.
        limits: see there.
        token: if given, asked for in `Authorization: Bearer TOKEN` or as the first segment of the path.
    """

    def __init__(
        self, sources: dict[str, str], workers: int, limits: Limits = _DEFAULTS, token: str | None = None
    ) -> None:
        self.sources, self.workers, self.limits, self.token = sources, workers, limits, token
        self.graders: dict[str, Grader] = {}
        self.metrics = _Metrics()

    def app(self) -> FastAPI:
        """The application, with its routes."""
        app = FastAPI(lifespan=self.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        # Plain routes: FastAPI's own would take as long as the grading to work out arguments that there are none of.
        for prefix in [""] if self.token is None else ["", "/{token}"]:
            app.add_route(f"{prefix}/get_reward", partial(self.get_reward, next(iter(self.sources))), methods=["POST"])
            for name in self.sources:
                app.add_route(f"{prefix}/{name}/get_reward", partial(self.get_reward, name), methods=["POST"])
        app.add_route("/health", self.get_health)
        app.add_route("/ready", self.get_ready)
        app.add_route("/metrics", self.get_metrics)
        return app

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Starts the graders, which import their reward functions: a server that cannot grade does not start."""
        graders = {name: Grader(name, source, self.workers, self.limits) for name, source in self.sources.items()}
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, grader.pool.start) for grader in graders.values()))
        tasks = [loop.create_task(grader.work()) for grader in graders.values() for _ in range(grader.workers)]
        for grader in graders.values():
            self.metrics.watch(grader)
        self.graders = graders
        log.info("ready", extra={"fields": {"graders": list(graders), "workers": self.workers}})
        yield
        for task in tasks:
            task.cancel()
        for grader in graders.values():
            grader.pool.close()
        log.info("stopped")

    async def get_reward(self, name: str, request: Request) -> Response:
        """POST: grades with grader `name`, counts and logs."""
        start, count, refused = time.perf_counter(), 0, None
        try:
            result, count = await asyncio.wait_for(self._grade(name, request), self.limits.seconds)
        except Refused as error:
            refused = error
        except asyncio.TimeoutError:
            refused = Refused(503, f"no answer within {self.limits.seconds:g} s")
        response = _refusal(refused) if refused else JSONResponse(result)
        seconds = time.perf_counter() - start
        self.metrics.requests.labels(name, response.status_code).inc()
        self.metrics.gradings.labels(name).inc(count)
        self.metrics.seconds.labels(name).observe(seconds)
        fields = {"grader": name, "status": response.status_code, "queries": count, "ms": round(seconds * 1e3, 2)}
        if refused:
            fields["error"] = refused.message
        # The request's path is never logged: it may hold the token.
        log.log(logging.WARNING if refused else logging.INFO, "request", extra={"fields": fields})
        return response

    async def _grade(self, name: str, request: Request) -> tuple[dict, int]:
        """The answer, and how many queries it is for."""
        self._authorize(request)
        query, prompts, labels = read_request(await self._read_body(request), self.limits)
        result = await self.graders[name].grade(query, prompts, labels)
        if len(query) == 1:
            extra_logs = {name: value for name, [value] in result["extra_logs"].items()}
            result = {"rewards": result["rewards"][0], "scores": result["scores"][0], "extra_logs": extra_logs}
        return result, len(query)

    def _authorize(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, header = request.headers.get("authorization", "").partition(" ")
        given = request.path_params.get("token") or (header if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "the token is missing or wrong")

    async def _read_body(self, request: Request) -> bytes:
        parts, size = [], 0
        # What is too much is read and dropped: a client that is cut off while it sends never sees the answer.
        async for part in request.stream():
            size += len(part)
            if size <= self.limits.body_bytes:
                parts.append(part)
        if size > self.limits.body_bytes:
            raise Refused(413, f"the body is larger than {self.limits.body_bytes} bytes")
        return b"".join(parts)

    async def get_health(self, request: Request) -> Response:
        """GET: the process runs."""
        return JSONResponse({"status": "ok"})

    async def get_ready(self, request: Request) -> Response:
        """GET: whether every grader can grade. One whose processes are gone starts again, without waiting for work."""
        gone = [grader.pool for grader in self.graders.values() if not grader.pool.is_alive()]
        for pool in gone:
            asyncio.get_running_loop().run_in_executor(None, pool.start)
        ready = bool(self.graders) and not gone
        return JSONResponse({"ready": ready, "graders": list(self.sources)}, 200 if ready else 503)

    async def get_metrics(self, request: Request) -> Response:
        """GET: Prometheus' text."""
        try:
            self._authorize(request)
        except Refused as refused:
            return _refusal(refused)
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")


def _refusal(refused: Refused) -> Response:
    message = {"error": refused.message} | ({"field": refused.field} if refused.field else {})
    return JSONResponse(message, refused.status, {"Retry-After": "1"} if refused.status == 503 else None)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, event, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}))


def serve(
    sources: Sequence[tuple[str, str]], host: str, port: int, workers: int, limits: Limits, token: str | None
) -> None:
    """Runs the server until SIGTERM or SIGINT; what was accepted by then is answered."""
    import uvicorn

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    uvicorn.run(
        RewardServer(dict(sources), workers, limits, token).app(),
        host=host,
        port=port,
        access_log=False,  # it would log paths, which may hold the token
        log_config=None,
        timeout_graceful_shutdown=math.ceil(limits.seconds) + 5,
        backlog=4096,
        # Else an idle connection is dropped while OpenRLHF generates, and its next request on it fails.
        timeout_keep_alive=600,
    )
