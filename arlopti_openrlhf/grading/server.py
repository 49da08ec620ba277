"""Serves rewards to OpenRLHF over HTTP: `--reward.remote_url http://host:port/get_reward`.

    POST /get_reward    {"query": [...], "prompts": [...], "labels": [...]}
    200                 {"rewards": ..., "scores": ..., "extra_logs": {NAME: ...}}

Each grader answers at /NAME/get_reward, and the first one at /get_reward too. There are no `scores` where the reward
function gives none. The values of a single query are numbers, as OpenRLHF 0.11.2's client needs them: it sends one
query at a time, and would nest a list. The values of several queries are lists. An extra log that is undefined is NaN,
as Python reads and writes it in JSON.
"""

import asyncio
import hmac
import json
import logging
import math
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from arlopti_openrlhf import interrupts
from arlopti_openrlhf.grading.grader import Grader, Limits, Refused
from arlopti_openrlhf.grading.reward_answers import SERVER

log = logging.getLogger("arlopti_openrlhf.rewards")


def read_request(body: bytes | bytearray, limits: Limits) -> tuple[list, list, list]:
    """Return the three lists of a request.

    Raises:
        Refused: with status 413 or 422 and the field's name.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"the body is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise Refused(422, 'the body is not an object {"query": [...], "prompts": [...], "labels": [...]}')
    columns: list[list] = []
    for field, types in (("query", str), ("prompts", str | None), ("labels", object)):
        values = message.get(field)
        if not isinstance(values, list):
            raise Refused(422, f"{field} is {'not a list' if field in message else 'missing'}", field)
        if len(values) > limits.batch:
            raise Refused(413, f"{field} has {len(values)} items, more than {limits.batch}", field)
        if len(values) != len(message["query"]):
            raise Refused(422, f"{field} has {len(values)} items, query has {len(message['query'])}", field)
        for i, value in enumerate(values):
            if not isinstance(value, types):
                raise Refused(422, f"{field}[{i}] is not text", f"{field}[{i}]")
        columns.append(values)
    query, prompts, labels = columns
    if not query:
        raise Refused(422, "query is empty", "query")
    return query, prompts, labels


class RewardServer:
    """Answers the requests.

    Args:
        sources: name in the URL -> a reward of the package, or the path of a Python file. The first answers at
            /get_reward too.
        workers: grader processes, per grader.
        limits: what the server takes on.
        token: clients must send it as `Authorization: Bearer TOKEN`. None for all.
    """

    def __init__(self, sources: dict[str, str], workers: int, limits: Limits, token: str | None) -> None:
        self.workers, self.limits, self.token = workers, limits, token
        self.graders = {name: Grader(source, workers, limits) for name, source in sources.items()}
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
        self.left = Counter(
            "reward_clients_left", "Clients that left before their request was whole", registry=self.registry
        )
        for metric, text, value in (
            ("reward_queue", "Queries that wait or are graded", lambda grader: grader.queued),
            ("reward_grader_timeouts_total", "Calls ended at their time limit", lambda grader: grader.pool.timed_out),
            ("reward_grader_deaths_total", "Grader processes replaced", lambda grader: grader.pool.died),
        ):
            gauge = Gauge(metric, text, ["grader"], registry=self.registry)
            for name, grader in self.graders.items():
                gauge.labels(name).set_function(partial(value, grader))

    def start(self) -> None:
        """Start the graders' processes, which import their reward functions.

        Raises:
            RuntimeError: one could not be loaded. Its traceback is on standard error.
        """
        with ThreadPoolExecutor(len(self.graders)) as threads:
            list(threads.map(lambda grader: grader.pool.start(), self.graders.values()))

    def app(self) -> FastAPI:
        """Return the application, with its routes."""
        app = FastAPI(lifespan=self.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(Refused, _refusal)
        # Plain routes take the request itself. FastAPI's own take as long as the grading, to work out arguments.
        app.add_route("/get_reward", partial(self.get_reward, next(iter(self.graders))), methods=["POST"])
        for name in self.graders:
            app.add_route(f"/{name}/get_reward", partial(self.get_reward, name), methods=["POST"])
        app.add_route("/health", self.get_health)
        app.add_route("/ready", self.get_ready)
        app.add_route("/metrics", self.get_metrics)
        return app

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Log the start and the end, and end the graders' processes."""
        log.info("ready", extra={"fields": {"graders": list(self.graders), "workers": self.workers}})
        yield
        for grader in self.graders.values():
            grader.pool.close()
        log.info("stopped")

    async def get_reward(self, name: str, request: Request) -> Response:
        """Answer a POST with the rewards of grader `name`, and count and log it."""
        start, count, refused = time.perf_counter(), 0, None
        try:
            answer = await asyncio.wait_for(self._grade(name, request), self.limits.seconds)
            count = len(answer["rewards"])
        except Refused as error:
            refused = error
        except TimeoutError:
            refused = Refused(503, f"no answer within {self.limits.seconds:g} s")
        except ClientDisconnect:
            self.left.inc()
            return Response()
        response = await _refusal(request, refused) if refused else _json(_message(answer))
        seconds = time.perf_counter() - start
        self.requests.labels(name, response.status_code).inc()
        self.gradings.labels(name).inc(count)
        self.seconds.labels(name).observe(seconds)
        fields = {"grader": name, "status": response.status_code, "queries": count, "ms": round(seconds * 1e3, 2)}
        if refused:
            fields["error"] = refused.message
        log.log(logging.WARNING if refused else logging.INFO, "request", extra={"fields": fields})
        return response

    async def _grade(self, name: str, request: Request) -> dict:
        self._authorize(request)
        body = await self._read_body(request)
        return await self.graders[name].grade(*read_request(body, self.limits))

    def _authorize(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, header = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(header.encode(), self.token.encode()):
            raise Refused(401, "the token is missing or wrong")

    async def _read_body(self, request: Request) -> bytearray:
        body, is_too_large = bytearray(), False
        async for part in request.stream():
            # Read what is too much, and drop it. A client that is cut off while it sends never sees the answer.
            is_too_large = is_too_large or len(body) + len(part) > self.limits.body_bytes
            if is_too_large:
                body.clear()
            else:
                body += part
        if is_too_large:
            raise Refused(413, f"the body is larger than {self.limits.body_bytes} bytes")
        return body

    async def get_health(self, request: Request) -> Response:
        """Answer a GET: the process runs, and where it grades."""
        paths = ["/get_reward", *(f"/{name}/get_reward" for name in self.graders)]
        return _json({"status": "ok", "server": SERVER, "serves": paths})

    async def get_ready(self, request: Request) -> Response:
        """Answer a GET: 200 if every grader can grade. One without processes starts again at once."""
        missing = [grader.pool for grader in self.graders.values() if not grader.pool.is_alive()]
        for pool in missing:
            asyncio.get_running_loop().run_in_executor(None, pool.start)
        return _json({"ready": not missing, "graders": list(self.graders)}, 503 if missing else 200)

    async def get_metrics(self, request: Request) -> Response:
        """Answer a GET with Prometheus' text."""
        self._authorize(request)
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")


def _message(answer: dict) -> dict:
    """Return the message of an answer as `normalise` reads it. Where it has no scores, the message has none either."""
    shown = (lambda values: values[0]) if len(answer["rewards"]) == 1 else list
    message = {name: shown(answer[name]) for name in ("rewards", "scores") if answer[name] is not None}
    return message | {"extra_logs": {name: shown(values) for name, values in answer["extra_logs"].items()}}


async def _refusal(request: Request, refused: Refused) -> Response:
    message = {"error": refused.message} | ({"field": refused.field} if refused.field else {})
    return _json(message, refused.status, {"Retry-After": "1"} if refused.status == 503 else None)


def _json(message: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a message as Python's JSON: NaN is NaN, and text is ASCII, because a lone surrogate has no UTF-8."""
    return Response(json.dumps(message, separators=(",", ":")), status, headers, "application/json")


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: time (UTC), level, event, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}))


def serve(server: RewardServer, host: str, port: int) -> None:
    """Run a server that has been started until SIGTERM, SIGINT or SIGHUP, and then answer what it has accepted.

    A client that stops within a request's body is waited for, also at the end, until the server's limit of seconds.
    Under nohup SIGHUP stays ignored.

    Raises:
        SystemExit: with 128 + the signal's number.
    """
    import uvicorn
    import uvicorn.server

    # Each sample that waits has a connection. Without descriptors, the event loop accepts none and says nothing.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    uvicorn.server.HANDLED_SIGNALS = tuple(interrupts.handled())
    for signum in interrupts.handled():  # uvicorn sends itself the signal again once it has stopped
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    uvicorn.run(
        server.app(),
        host=host,
        port=port,
        http="h11",  # which bounds the size of a request's head
        access_log=False,  # `get_reward` logs requests
        log_config=None,
        timeout_graceful_shutdown=math.ceil(server.limits.seconds) + 5,
        backlog=4096,
        # With less, uvicorn drops an idle connection while OpenRLHF generates, and the next request on it fails.
        timeout_keep_alive=600,
    )
