"""Checks the source of rewards: that it can be loaded, or reached, and answers with numbers."""

import ast
import http.client
import importlib.util
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool
from arlopti_openrlhf.ops.preflight import data, probe
from arlopti_openrlhf.ops.preflight.finding import Finding

_PROBE_ROWS = 4
_PROBE_SECONDS = 8.0  # for the import of a reward file and its answers to the rows
_HEALTH_SECONDS = 2.0
_UNLIMITED = 2.0**20  # GiB


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what is wrong with the source of rewards.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    if args.train.agent_func_path:
        return _check_agent(args.train.agent_func_path)
    if not args.reward.remote_url:
        if args.reward.model_name_or_path:
            return []
        remedy = "give kk, math, a Python file or a URL, or --reward.model_name_or_path"
        return [Finding("--reward.remote_url", None, "nothing gives a reward", remedy)]
    source = args.reward.remote_url[0]
    if source in REWARD_FILES:
        return _check_math() if source == "math" else []
    if source.endswith(".py"):
        return _check_file(source, args)
    return _check_servers(args.reward.remote_url)


def _check_math() -> list[Finding]:
    if importlib.util.find_spec("math_verify"):
        return []
    return [Finding("--reward.remote_url", "math", "math-verify is not installed", "pip install math-verify")]


def _check_agent(path: str) -> list[Finding]:
    """Look at an agent's file without running it, because it imports OpenRLHF, which takes long."""
    flag = "--train.agent_func_path"
    if not path.endswith(".py") or not Path(path).is_file():
        return [Finding(flag, path, "there is no such Python file", "correct the path")]
    try:
        names = defined_names(path)
    except (OSError, SyntaxError, ValueError) as error:
        return [Finding(flag, path, f"it does not parse: {error}", "mend the file")]
    if names & {"AgentExecutor", "*"}:
        return []
    return [Finding(flag, path, "it has no class `AgentExecutor`", "name the class that OpenRLHF is to call so")]


def defined_names(path: str) -> set[str]:
    """Return the names that a Python file defines or imports, without running it. "*" stands for a star import.

    Raises:
        OSError, SyntaxError, ValueError: it cannot be read, or does not parse.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _check_file(path: str, args: SimpleNamespace) -> list[Finding]:
    flag = "--reward.remote_url"
    if not Path(path).is_file():
        return [Finding(flag, path, "there is no such file", "correct the path")]
    rows = data.first_prompts(args, _PROBE_ROWS)
    seconds = min(_PROBE_SECONDS, args.reward.timeout_seconds)
    with closing(WorkerPool(f"{probe.__name__}:reward_problem", 1, seconds, memory_gib=_UNLIMITED)) as pool:
        try:
            problem = pool.call(path, rows)
        except TimedOut:
            problem = f"it has not graded {len(rows)} rows in {seconds:g} s, its import included"
            # A reward that asks another model may take longer. The run waits as long as it is told to.
            return [
                Finding(
                    flag,
                    path,
                    problem,
                    f"make sure that it returns: the run ends a call after {args.reward.timeout_seconds:g} s "
                    "(--reward.timeout_seconds)",
                    is_fatal=seconds == args.reward.timeout_seconds,
                )
            ]
        except Died:
            problem = f"its process ends while it grades {len(rows)} rows"
        except (Raised, RuntimeError) as error:
            problem = f"it could not be asked: {str(error).strip()[-200:]}"
    return [Finding(flag, path, problem, "mend the function")] if problem else []


def _check_servers(urls: Sequence[str]) -> list[Finding]:
    """Ask the servers whether they are there. No reward is asked for, because a stranger's server may take it ill."""
    asked = {url: _ask_health(url) for url in urls}
    is_fatal = not any(answers for answers, _ in asked.values())
    remedy = "start the server first, or correct the URL" if is_fatal else "make sure that it gives rewards"
    return [
        Finding("--reward.remote_url", _shown(url), problem, remedy, is_fatal)
        for url, (_, problem) in asked.items()
        if problem
    ]


def _ask_health(url: str) -> tuple[bool, str]:
    """Return whether anything answers at a URL, and what is wrong with it ("" where /health says that all is well)."""
    try:
        is_url = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        is_url = False
    if not is_url:
        return False, "no URL of a server"
    opener = build_opener(ProxyHandler({}))  # the run asks without a proxy, too
    start = time.monotonic()
    while True:
        try:
            with opener.open(f"{_shown(url)}/health", timeout=_HEALTH_SECONDS):
                return True, ""
        except HTTPError as error:
            return True, f"something answers, but /health with status {error.code}, so the server is not checked"
        except http.client.HTTPException:
            return True, "something answers, but not in HTTP"
        except (OSError, ValueError) as error:
            # A server that is about to listen has a moment.
            if time.monotonic() - start > _HEALTH_SECONDS:
                return False, f"no answer: {getattr(error, 'reason', error)}"
            time.sleep(0.2)


def _shown(url: str) -> str:
    """Return a URL without the user and the path, which may hold a password or a token."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
