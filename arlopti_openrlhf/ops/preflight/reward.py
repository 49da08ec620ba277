"""Checks the source of rewards: that it can be loaded, or reached, and answers with numbers."""

import asyncio
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.reward_answers import SERVER
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight import data, right_answers
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.right_answers import Refused
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError, RewardProcess, RewardTimeout

_FLAG = "--reward.remote_url"
_PROBE_ROWS = 4
_IMPORT_SECONDS, _PROBE_SECONDS = 60.0, 8.0  # for the import of a reward file, and for its answers to the rows
_SERVER_SECONDS = 60.0  # for an answer of our own server
_CONTRACT = "the file needs reward_func(queries, prompts, labels), whose queries are prompts with their answers"
_HEALTH_SECONDS, _HEALTH_BYTES = 2.0, 2**16  # for a part of an answer, and twice as long for all of it


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the source of rewards. `values` looks whether there is one."""
    sources = args.reward.remote_url or [""]
    ours = REWARDS.get(sources[0])
    if args.train.agent_func_path:
        return  # vLLM's engines load it when they start, and say what is wrong with it
    if ours:  # `data.check` asks it about the labels
        if ours.package and not importlib.util.find_spec(ours.package.replace("-", "_")):
            yield Finding(_FLAG, ours.name, f"{ours.package} is not installed", f"pip install {ours.package}")
    elif sources[0].endswith(".py"):
        yield from _check_function(sources[0], args)
    elif sources[0]:
        yield from _check_servers(sources, args)


def _check_function(path: str, args: SimpleNamespace) -> Iterator[Finding]:
    """Ask a file as the run does: in a process of its own, one sample a call."""
    limit = args.reward.timeout_seconds
    rows, tokenizer = data.first_prompts(args, _PROBE_ROWS)
    try:
        process = RewardProcess(path, limit, import_seconds=_IMPORT_SECONDS, is_quiet=True)
    except TimeoutError as error:
        yield Finding(_FLAG, path, f"{error}, so no reward was tried", "make sure that it ends", is_fatal=False)
        return
    except RuntimeError as error:
        cause = _first_line(error, path)
        yield Finding(_FLAG, path, cause, _CONTRACT if "`reward_func`" in cause else "mend the file")
        return
    problem: str | None
    is_fatal, remedy = True, "mend the function"
    deadline = time.monotonic() + _PROBE_SECONDS
    end = threading.Timer(_PROBE_SECONDS, process.kill)  # a call's own limit does not bound calls one after another
    end.start()
    try:
        problem = right_answers.unrewarded(_asking(process), rows, tokenizer)
        is_fatal, remedy = False, "look at what the function reads of an answer, and at the labels"
    except (Refused, RewardTimeout) as error:
        problem = f"{error}"
        if time.monotonic() >= deadline or isinstance(error, RewardTimeout):
            problem = f"it has not graded {len(rows)} rows: no result after {min(limit, _PROBE_SECONDS):g} s"
            # A reward that asks another model may take longer. The run waits as long as it is told to.
            remedy = f"make sure that it returns: the run ends a call after {limit:g} s (--reward.timeout_seconds)"
            is_fatal = isinstance(error, RewardTimeout)
    finally:
        end.cancel()
        process.kill()
    if foreign := right_answers.foreign_parameters(process.parameters):
        problem, remedy = f"{problem}. {foreign}" if problem else foreign, _CONTRACT
    if problem:
        yield Finding(_FLAG, path, problem, remedy, is_fatal)


def _asking(process: RewardProcess) -> right_answers.Ask:
    def ask(query: str, prompt: str, label: Any) -> Any:
        try:
            return process.call(query, prompt, label)
        except RewardTimeout:
            raise
        except RewardError as error:
            raise Refused(_first_line(error, process.path)) from None

    return ask


def _first_line(error: Exception, path: str) -> str:
    return str(error).splitlines()[0].removeprefix(path).removeprefix(":").strip()[:400]


def _check_servers(urls: list[str], args: SimpleNamespace) -> Iterator[Finding]:
    """Ask servers for /health alone. A request for a reward could have side effects on somebody else's server.

    One that is away is fatal where no other answers, and a stranger's answer says nothing. Our own grades the rows.
    """
    import httpx  # which transformers has imported by then

    away: dict[str, str] = {}
    for url in urls:
        server = _without_secrets(url)
        if missing := " and ".join(credentials.missing(url)):
            problem = f"{missing} is not in the environment"
            yield Finding(_FLAG, url, problem, "set it")
            continue
        try:
            is_ours = _is_ours(server)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            away[server] = credentials.mask(str(error), url)
        else:
            if is_ours:
                yield from _check_answers(url, args)
            else:
                problem = "something answers, but not this package's server, so rewards are not checked"
                yield Finding(_FLAG, server, problem, "make sure that it gives some", is_fatal=False)
    for server, cause in away.items():
        is_fatal = len(away) == len(set(map(_without_secrets, urls)))
        yield Finding(_FLAG, server, f"no answer: {cause}", "start the server first, or correct the URL", is_fatal)


def _check_answers(url: str, args: SimpleNamespace) -> Iterator[Finding]:
    """Ask our own server to grade the rows."""
    import aiohttp  # as the run does, and 0.3 s that no other check needs

    server, remedy = _without_secrets(url), "look at what the server's function reads of an answer, and at the labels"
    rows, tokenizer = data.first_prompts(args, _PROBE_ROWS)
    try:
        if unrewarded := right_answers.unrewarded(_posting(url), rows, tokenizer):
            yield Finding(_FLAG, server, unrewarded, remedy, is_fatal=False)
    except Refused as error:
        yield Finding(_FLAG, server, f"{error}", "correct the URL, or what the server's function returns")
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        cause = credentials.mask(f"{type(error).__name__}: {error}", url)[:200]  # the run asks again
        problem = f"it has not graded {len(rows)} rows: {cause}"
        yield Finding(_FLAG, server, problem, remedy, is_fatal=False)


def _posting(url: str) -> right_answers.Ask:
    from arlopti_openrlhf.ops.rollouts import reward_http

    def ask(query: str, prompt: str, label: Any) -> Any:
        try:
            return asyncio.run(asyncio.wait_for(reward_http.post(url, query, prompt, label), _SERVER_SECONDS))
        except RewardError as error:
            raise Refused(_first_line(error, url)) from None

    return ask


def _is_ours(base: str) -> bool:
    """Return whether this package's server answers at /health.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: nothing does.
    """
    import httpx

    async def whole_answer() -> bytes:
        body = b""
        # The run asks without a proxy, too, and follows no server to another.
        async with (
            asyncio.timeout(2 * _HEALTH_SECONDS),
            httpx.AsyncClient(timeout=_HEALTH_SECONDS, trust_env=False) as client,
            client.stream(
                "GET", f"{credentials.expand(base)}/health", headers={"Accept-Encoding": "identity"}
            ) as answer,
        ):
            async for part in answer.aiter_raw():
                body += part
                if len(body) > _HEALTH_BYTES:
                    break
        return body

    try:
        said = json.loads(asyncio.run(whole_answer()))
    except (TimeoutError, ValueError, RecursionError):  # something answers, without end or in other words
        return False
    return isinstance(said, dict) and said.get("server") == SERVER


def _without_secrets(url: str) -> str:
    """Return a URL without the user, the path and the query, which may hold a password or a token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}"
