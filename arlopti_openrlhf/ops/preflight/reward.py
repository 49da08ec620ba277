"""Checks the source of rewards: that it can be loaded, or reached, and answers with numbers."""

import importlib.util
import re
import symtable
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from arlopti_openrlhf.grading import REWARD_FILES
from arlopti_openrlhf.grading.reward_answers import SERVER
from arlopti_openrlhf.grading.worker_pool import TimedOut
from arlopti_openrlhf.ops.preflight import data, probe
from arlopti_openrlhf.ops.preflight.finding import Finding

if TYPE_CHECKING:
    import httpx

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
        yield from _check_servers(sources)


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
    except TypeError as error:  # a label that the run can send, and the probe cannot
        problem, remedy, is_fatal = f"not tried: {error}", "call it with such a label yourself", False
    except probe.NO_ANSWER as error:
        problem = f"it has not graded {len(rows)} rows: {probe.reason(error)}"
        if isinstance(error, TimedOut):
            # A reward that asks another model may take longer. The run waits as long as it is told to.
            remedy = f"make sure that it returns: the run ends a call after {limit:g} s (--reward.timeout_seconds)"
            is_fatal = seconds == limit
    if problem:
        yield Finding(_FLAG, path, problem, remedy, is_fatal)


def _check_servers(urls: list[str]) -> Iterator[Finding]:
    """Ask servers for /health alone. A request for a reward could have side effects on somebody else's server.

    One that is away is fatal where no other answers, and a stranger's answer says nothing. Our own says at which paths
    it grades. The run would end at the first request to another one.
    """
    import httpx  # which transformers has imported by then

    away: dict[str, Exception] = {}
    patient = httpx.HTTPTransport(retries=_RETRIES)  # a server that is about to listen has a moment
    # The run asks without a proxy, too.
    with httpx.Client(transport=patient, timeout=_HEALTH_SECONDS, follow_redirects=True) as client:
        for url in urls:
            server = _without_secrets(url)
            try:
                answer = client.get(f"{server}/health")
            except httpx.RemoteProtocolError:
                problem = "something answers, but not in HTTP"
                yield Finding(_FLAG, server, problem, "correct the URL, unless it gives rewards", is_fatal=False)
            except httpx.TooManyRedirects:
                problem = "something answers at /health, and redirects without end"
                yield Finding(_FLAG, server, problem, "correct the URL, unless it gives rewards", is_fatal=False)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                away[server] = error
            else:
                yield from _check_path(client, url, answer)
    for server, cause in away.items():
        is_fatal = len(away) == len(set(map(_without_secrets, urls)))
        yield Finding(_FLAG, server, f"no answer: {cause}", "start the server first, or correct the URL", is_fatal)


def _check_path(client: "httpx.Client", url: str, health: "httpx.Response") -> Iterator[Finding]:
    """Check that a server grades at a URL's path, by what it says at /health."""
    server, path = _without_secrets(url), urlsplit(url).path.rstrip("/")
    try:
        said = health.json()
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("server") != SERVER:
        status = f"/health: status {health.status_code}, {health.headers.get('content-type', 'of no type')}"
        problem = f"something answers, but not this package's server ({status}), so rewards are not checked"
        yield Finding(_FLAG, server, problem, "make sure that it gives some", is_fatal=False)
        return
    token, paths = "", " or ".join(said["serves"])
    if said["needs_token"]:
        token, _, path = path.removeprefix("/").partition("/")
        path = f"/{path}"
        if not client.get(f"{server}/{token}/health").is_success:
            problem = "the token that the server wants is not there, or wrong"
            yield Finding(_FLAG, server, problem, "put it before the path: /TOKEN/get_reward")
            return
    if path not in said["serves"]:
        problem = f"the server has no rewards at {path or '/'}, but at {paths}"
        yield Finding(_FLAG, server, problem, "correct the URL")


def _without_secrets(url: str) -> str:
    """Return a URL without the user and the path, which may hold a password or a token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
