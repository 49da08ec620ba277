"""Checks the source of rewards: that it can be loaded, or reached, and answers with numbers."""

import asyncio
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.reward_answers import SERVER, Grade
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
_HEALTH_SECONDS, _HEALTH_BYTES = 2.0, 2**16  # for a connection, and twice that for the answer, of this size at most


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the source of rewards. `values` looks whether there is one."""
    sources = args.reward.remote_url or [""]
    ours = REWARDS.get(sources[0])
    if args.train.agent_func_path:  # vLLM's engines load it when they start, and say what is wrong with it
        return
    if ours:
        if ours.package and not importlib.util.find_spec(ours.package.replace("-", "_")):
            yield Finding(_FLAG, ours.name, f"{ours.package} is not installed", f"pip install {ours.package}")
            return
        rows, tokenizer = data.first_prompts(args, _PROBE_ROWS)
        reward_func = ours.module.reward_func
        with suppress(Refused):  # for a label that it cannot read, which `data.check` reports
            trial = right_answers.try_out(lambda *sample: reward_func(*([part] for part in sample)), rows, tokenizer)
            yield from check_grades(trial.grades, args)
    elif sources[0].endswith(".py"):
        yield from _check_function(sources[0], args)
    elif sources[0]:
        yield from _check_servers(sources, args)


def check_grades(grades: list[Grade], args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse flags that do not go with what right and wrong answers earned."""
    if not grades:
        return
    coefficient, lowest = args.reward.stop_properly_penalty_coef, min(grade.reward for grade in grades)
    if coefficient is not None and 0 <= coefficient < 1 and lowest < 0:
        scaled = coefficient * lowest + 0.0  # no -0
        problem = f"it multiplies: a wrong answer that earned {lowest:g} would earn {scaled:g} if it were cut off"
        remedy = f"give what such an answer is to earn, as {lowest:g}"
        yield Finding.of(args, "reward.stop_properly_penalty_coef", problem, remedy)
    if not args.algo.dynamic_filtering_enable:
        return
    scores = [right_answers.value(grade) for grade in grades]
    low, high = min(scores), max(scores)
    least, most = args.algo.dynamic_filtering_range
    flag, remedy = "algo.dynamic_filtering_range", f"give {low:g} {high:g}"
    if low == high and least < low < most:
        problem = f"all answers scored {low:g}, so every prompt is kept, though nothing is learned from equal rewards"
        yield Finding.of(args, flag, problem, "give the lowest and the highest score", is_fatal=False)
    elif (least, most) == (0, 1) and (low < least or most < high):  # another range may be meant so
        problem = f"answers scored from {low:g} to {high:g}, so prompts with right and wrong ones are left out"
        yield Finding.of(args, flag, problem, remedy)
    elif low < high and (least < low or high < most):
        problem = f"answers scored from {low:g} to {high:g}, so prompts whose answers are all wrong or right are kept"
        yield Finding.of(args, flag, problem, remedy, is_fatal=False)


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
        trial = right_answers.try_out(_asking(process), rows, tokenizer)
        problem, is_fatal = trial.problem, False
        remedy = "look at what the function reads of an answer, and at the labels"
        yield from check_grades(trial.grades, args)
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
    import aiohttp

    away: dict[str, str] = {}
    for url in urls:
        server = _without_secrets(url)
        if missing := " and ".join(credentials.missing(url)):
            problem = f"{missing} is not in the environment"
            yield Finding(_FLAG, url, problem, "set it")
            continue
        try:
            is_ours = asyncio.run(_is_ours(server))
        except aiohttp.ClientError as error:
            away[server] = credentials.mask(f"{type(error).__name__}: {error}", url)
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
    import aiohttp

    server, remedy = _without_secrets(url), "look at what the server's function reads of an answer, and at the labels"
    rows, tokenizer = data.first_prompts(args, _PROBE_ROWS)
    try:
        trial = right_answers.try_out(_posting(url), rows, tokenizer)
        if trial.problem:
            yield Finding(_FLAG, server, trial.problem, remedy, is_fatal=False)
        yield from check_grades(trial.grades, args)
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


async def _is_ours(base: str) -> bool:
    """Return whether this package's server answers at /health, in time and at no great length.

    Raises:
        aiohttp.ClientError: nothing answers.
    """
    import aiohttp

    limit = aiohttp.ClientTimeout(total=2 * _HEALTH_SECONDS, sock_connect=_HEALTH_SECONDS)
    try:
        # As in the run: without a proxy, and no server leads to another.
        async with aiohttp.ClientSession(timeout=limit) as session:
            async with session.get(f"{credentials.expand(base)}/health", allow_redirects=False) as answer:
                await answer.content.readexactly(_HEALTH_BYTES)
    except asyncio.IncompleteReadError as error:  # the whole answer is shorter
        with suppress(ValueError):
            said = json.loads(error.partial)
            return isinstance(said, dict) and said.get("server") == SERVER
    except TimeoutError as error:
        if isinstance(error, aiohttp.ClientError):  # no connection
            raise
    return False


def _without_secrets(url: str) -> str:
    """Return a URL without the user, the path and the query, which may hold a password or a token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}"
