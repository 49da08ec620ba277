"""Checks the source of rewards: that it can be loaded, or reached, and answers with numbers."""

import importlib.util
import re
import symtable
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.grading import REWARD_FILES
from arlopti_openrlhf.grading.worker_pool import TimedOut
from arlopti_openrlhf.ops.preflight import data, probe
from arlopti_openrlhf.ops.preflight.finding import Finding

_FLAG, _AGENT = "--reward.remote_url", "--train.agent_func_path"
_PROBE_ROWS = 4
_PROBE_SECONDS = 8.0  # for the import of a reward file and its answers to the rows
_HEALTH_SECONDS = 2.0
_RETRIES = 3  # within two seconds


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the source of rewards. `values` looks whether there is one."""
    sources = args.reward.remote_url or [""]
    if args.train.agent_func_path:
        yield from _check_agent(args.train.agent_func_path)
    elif sources[0] == "math" and not importlib.util.find_spec("math_verify"):
        yield Finding(_FLAG, "math", "math-verify is not installed", "pip install math-verify")
    elif sources[0].endswith(".py"):
        yield from _check_file(sources[0], args)
    elif sources[0] and sources[0] not in REWARD_FILES:
        # Only /health is asked. A request for a reward could have side effects on somebody else's server.
        answers = {url: _ask_health(url) for url in sources}
        is_fatal = not any(has_answered for has_answered, _ in answers.values())
        remedy = "start the server first, or correct the URL" if is_fatal else "make sure that it gives rewards"
        for url, (_, problem) in answers.items():
            if problem:
                yield Finding(_FLAG, _without_secrets(url), problem, remedy, is_fatal)


def defined_names(path: str) -> set[str]:
    """Return the names that a Python file defines or imports, without running it. "*" stands for a star import.

    Raises:
        OSError, SyntaxError, ValueError: it cannot be read, or does not parse.
    """
    with tokenize.open(path) as file:  # in the encoding that it names
        code = file.read()
    symbols = symtable.symtable(code, path, "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return names | {"*"} if re.search(r"\bimport\s+\*", code) else names


def _check_agent(path: str) -> Iterator[Finding]:
    """Look at an agent's file without running it, because it imports OpenRLHF, which takes long."""
    if not path.endswith(".py") or not Path(path).is_file():
        yield Finding(_AGENT, path, "there is no such Python file", "correct the path")
        return
    try:
        if not defined_names(path) & {"AgentExecutor", "*"}:
            remedy = "name the class that OpenRLHF is to call so"
            yield Finding(_AGENT, path, "it has no class `AgentExecutor`", remedy)
    except (OSError, SyntaxError, ValueError) as error:
        yield Finding(_AGENT, path, f"it does not parse: {error}", "mend the file")


def _check_file(path: str, args: SimpleNamespace) -> Iterator[Finding]:
    if not Path(path).is_file():
        yield Finding(_FLAG, path, "there is no such file", "correct the path")
        return
    rows, limit = data.first_prompts(args, _PROBE_ROWS), args.reward.timeout_seconds
    seconds, remedy, is_fatal = min(_PROBE_SECONDS, limit), "mend the function", True
    try:
        problem = probe.ask(f"{probe.__name__}:reward_problem", path, rows, seconds=seconds).result()
    except probe.NO_ANSWER as error:
        problem = f"it has not graded {len(rows)} rows: {probe.reason(error)}"
        if isinstance(error, TimedOut):
            # A reward that asks another model may take longer. The run waits as long as it is told to.
            remedy = f"make sure that it returns: the run ends a call after {limit:g} s (--reward.timeout_seconds)"
            is_fatal = seconds == limit
    if problem:
        yield Finding(_FLAG, path, problem, remedy, is_fatal)


def _ask_health(url: str) -> tuple[bool, str]:
    """Return whether anything answers at a URL, and what is wrong with it ("" where /health says that all is well)."""
    import httpx  # which transformers has imported by then

    patient = httpx.HTTPTransport(retries=_RETRIES)  # a server that is about to listen has a moment
    try:
        # The run asks without a proxy, too.
        with httpx.Client(transport=patient, timeout=_HEALTH_SECONDS, follow_redirects=True) as client:
            answer = client.get(f"{_without_secrets(url)}/health")
    except httpx.RemoteProtocolError:
        return True, "something answers, but not in HTTP"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return False, f"no answer: {error}"
    status = f"/health with status {answer.status_code}"
    return True, "" if answer.is_success else f"something answers, but {status}, so the server is not checked"


def _without_secrets(url: str) -> str:
    """Return a URL without the user and the path, which may hold a password or a token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
