"""Calls a reward function in a process of its own, which can be ended when a call takes too long.

A thread cannot be ended, and code that holds Python's lock, such as a regular expression without end, would stop the
vLLM engine too. The process imports the file once and serves its calls in threads, as upstream calls the function in
threads of the engine. So a module's state is shared by all calls of an engine, and a function that waits for a service
serves many samples at a time. Each thread has an event loop.

Only the main thread may handle signals, and the time limits of math-verify and others are alarms. A thread's call that
asks for one has no result, even if the function hides that: it is made again in the process's main thread, as are all
calls after it. There they run one after another, and share the module's state still, as forked processes would not.
"""

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from arlopti_openrlhf import terminal, user_files
from arlopti_openrlhf.grading.environment import without_secrets
from arlopti_openrlhf.grading.reward_answers import to_json

# Why not an actor of Ray? Its process would see no GPU, and an error on import would crash it without a status. A call
# took 0.9 ms and the process 128 MB (Ray 2.55), where this one takes 0.06 ms and 16 MB.

# The process finds modules where the engine does. With `python -m`, it would look into the working directory first.
_COMMAND = f"""
import sys
sys.path[:] = sys.argv.pop(1).split({os.pathsep!r})
from {__name__} import main
main(*sys.argv[1:])
"""
_THREADS = 32  # asyncio's default executor, which calls `call`, has no more
_STACK_SECONDS = 0.5  # for a process to write its stacks


class RewardError(Exception):
    """A sample has no usable reward, and nothing is left to try."""


class RewardTimeout(RewardError):
    """A call took too long."""


def about(query: str, label: Any) -> str:
    """Return what an error says of the sample that it concerns."""
    return f"\nlabel: {terminal.one_line(str(label)[:2000])}\nquery: {terminal.one_line(query)}"


class RewardProcess:
    """Calls `reward_func` of a file in a process of its own. Any number of threads may call it at the same time.

    What the function prints goes where this process's output goes. The process has no connection to Ray.

    Args:
        path: the file.
        timeout: seconds of wall-clock time that a call may take.
        import_timeout: seconds that its import may take. None for no limit.
        is_quiet: drop what the file prints.

    Raises:
        TimeoutError: the import took too long.
        RuntimeError: the file cannot be loaded, or has no `reward_func`. The first line says why.
    """

    def __init__(self, path: str, timeout: float, import_timeout: float | None = None, is_quiet: bool = False) -> None:
        self.path, self.timeout = path, timeout
        self._failure: RewardError | None = None  # of the call that ended the process
        self._needs_main_thread = False
        self._stacks = tempfile.TemporaryFile()
        pipes = [Pipe() for _ in range(_THREADS + 1)]  # one for each thread of the process, the last for the main one
        theirs = [self._stacks.fileno(), *(end.fileno() for _, end in pipes)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, os.pathsep.join(sys.path), path, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if is_quiet else None,
            stderr=subprocess.DEVNULL if is_quiet else None,
            pass_fds=theirs,
            env=without_secrets(),
            start_new_session=True,  # `kill` ends the whole group
        )
        for _, end in pipes:
            end.close()
        *threads, main = [ours for ours, _ in pipes]
        self._threads, self._main_thread = _free(threads), _free([main])
        if import_timeout is not None and not main.poll(import_timeout):
            self.kill()
            raise TimeoutError(f"its import takes more than {import_timeout:g} s")
        try:
            loaded = json.loads(main.recv_bytes())
        except EOFError:
            loaded = {"failure": self._end()}
        if loaded["failure"]:
            self.kill()
            raise RuntimeError(f"{path}: {loaded['failure']}")
        self.parameters: list[str] = loaded["parameters"]  # names of the function's

    def call(self, query: str, prompt: str, label: Any) -> Any:
        """Return the function's result for one sample, as JSON holds it. Tensors and arrays are lists.

        Raises:
            RewardTimeout: this call or another took longer than the limit, which ended the process. The message ends
                with the stacks of all calls that ran.
            RewardError: the function raised, or the process ended by itself.
        """
        reply = {} if self._needs_main_thread else self._ask(self._threads, query, prompt, label)
        if not reply:
            self._needs_main_thread = True
            reply = self._ask(self._main_thread, query, prompt, label)
        if "raised" in reply:
            cause = f"{self.path}: reward_func raised {reply['raised']}{about(query, label)}"
            raise RewardError(cause) from RuntimeError(reply["traceback"])
        return reply["result"]

    def _ask(self, free: "queue.LifoQueue[Connection]", query: str, prompt: str, label: Any) -> dict:
        """Return the reply to a call, which is empty if the function needs the main thread.

        Raises:
            RewardError: the process has ended, or was ended at the limit.
        """
        connection = free.get()
        try:
            connection.send(([query], [prompt], [label]))
            if connection.poll(self.timeout):
                return json.loads(connection.recv_bytes())
            limit = f"no result after {self.timeout:g} s (--reward.timeout_seconds)"
            kind: type[RewardError] = RewardTimeout
            cause = f"reward_func gave {limit}, while it was here:\n{self._running()}"
        except (EOFError, OSError):
            kind, cause = RewardError, f"{self._end()} while it graded this sample, and perhaps others"
        finally:
            free.put(connection)
        # Before it is killed, because the other calls, which end with the process, name this one.
        self._failure = self._failure or kind(f"{self.path}: {cause}{about(query, label)}")
        self.kill()
        raise self._failure

    def kill(self) -> None:
        """End the process and those of its group. Calls that run fail."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _running(self) -> str:
        """Return the stacks of the calls that run. Python need not run for that."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        stacks = os.pread(self._stacks.fileno(), 2**20, 0).decode(errors="replace").split("\n\n")
        return "\n".join(stack for stack in stacks if " in _answer\n" in stack)

    def _end(self) -> str:
        return f"its process ended with status {self._process.wait()}"


def _free(connections: list[Connection]) -> "queue.LifoQueue[Connection]":
    free: queue.LifoQueue[Connection] = queue.LifoQueue()
    for connection in connections:
        free.put(connection)
    return free


# --- in the process ------------------------------------------------------------------------------------------


class _Signals:
    """Notes which of our threads ask for signals, by functions that only the main thread may call, or has use for."""

    def __init__(self) -> None:
        self.threads, self.asking = set[int](), set[int]()
        os.register_at_fork(after_in_child=self.threads.clear)  # a thread that forks is its child's main thread
        for name in ("signal", "alarm", "setitimer", "set_wakeup_fd"):
            setattr(signal, name, self._noting(getattr(signal, name)))

    def _noting(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def noting(*args, **kwargs):
            thread = threading.get_ident()
            if thread in self.threads:
                self.asking.add(thread)
                raise ValueError("signal only works in main thread of the main interpreter")  # as Python says it
            return function(*args, **kwargs)

        return noting


def _answer(function: Callable, path: str, args: tuple) -> bytes:
    try:
        return to_json({"result": function(*args)}).encode()
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        return json.dumps({"raised": _message(error, path), "traceback": stack}).encode()


def _message(error: BaseException, path: str) -> str:
    """Return an error with the last line of the file that it comes from."""
    first, *rest = str(error).splitlines() or [""]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    first = f"{type(error).__name__}: {first}" + (f" (line {lines[-1]})" if lines else "")
    return "\n".join([first, *rest])


def _serve(function: Callable, path: str, connection: Connection, signals: _Signals) -> None:
    """Answer calls in this thread, until the other side closes its connection."""
    thread, is_main = threading.get_ident(), threading.current_thread() is threading.main_thread()
    if not is_main:
        signals.threads.add(thread)
    loop = asyncio.new_event_loop()
    try:
        while True:
            args = connection.recv()
            loop = asyncio.new_event_loop() if loop.is_closed() else loop
            asyncio.set_event_loop(loop)  # the last call may have taken it away, as asyncio.run does
            answer = _answer(function, path, args)
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would go off here
            elif thread in signals.asking:
                signals.asking.remove(thread)
                answer = b"{}"
            connection.send_bytes(answer)
    except (EOFError, OSError):
        os._exit(0)  # the engine has ended. Other threads may still work, to no end


def _load(path: str) -> Callable | str:
    """Return the file's `reward_func`, or why there is none."""
    try:
        module = user_files.load(path, "reward_func")
    except BaseException as error:
        return f"its import fails: {_message(error, path)}\n{traceback.format_exc()}"
    function = vars(module).get("reward_func")
    if callable(function):
        return function
    own = ", ".join(_own_functions(module)[:3])
    return "it has no function `reward_func`" + (f", but {own}" if own else "")


def _own_functions(module: ModuleType) -> list[str]:
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    own = [each for each in functions if each.__module__ == module.__name__ and not each.__name__.startswith("_")]
    return [f"{each.__name__}({', '.join(_parameters(each))})" for each in own]


def _parameters(function: Callable) -> list[str]:
    """Return the names of the parameters that can be given by place, as OpenRLHF gives them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is written in C
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def main(path: str, stacks: str, *descriptors: str) -> None:
    """Serve calls of the file's `reward_func`, until the other side closes its connections.

    Args:
        path: the file.
        stacks: descriptor of the file for the stacks that SIGUSR1 asks for.
        descriptors: those of the connections. Each gets a thread, and the last the main one.
    """
    *connections, last = [Connection(int(descriptor)) for descriptor in descriptors]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)
    signals = _Signals()  # before the file takes functions out of `signal`
    function = _load(path)
    if isinstance(function, str):
        last.send_bytes(json.dumps({"failure": function}).encode())
        os._exit(1)
    last.send_bytes(json.dumps({"failure": None, "parameters": _parameters(function)}).encode())
    for connection in connections:
        threading.Thread(target=_serve, args=(function, path, connection, signals), daemon=True).start()
    _serve(function, path, last, signals)
