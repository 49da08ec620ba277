"""Calls a function in a process that can be killed, which bounds what it costs if it hangs, dies or takes all memory.

The process imports the function once, and answers each connection in a fork of itself or in a thread. A fork takes
milliseconds, can be killed alone, and may have a limit of memory. Threads share the module's state. The caller gets
JSON and no pickle, because a process that has read a model's answer may send anything.
"""

import asyncio
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from arlopti_openrlhf import user_files
from arlopti_openrlhf.grading.environment import without_secrets
from arlopti_openrlhf.grading.reward_answers import to_json

# Why not an actor of Ray? Its process would see no GPU, and an error on import would crash it without a status. A call
# took 0.9 ms and the process 128 MB (Ray 2.55), where a thread here takes 0.06 ms and the process 16 MB.

# The process finds modules where the caller does. With `python -m`, it would look into the working directory first.
_COMMAND = f"""
import sys
sys.path[:] = sys.argv.pop(1).split({os.pathsep!r})
from {__name__} import main
main(*sys.argv[1:])
"""
_THREADS = 1024  # more than anybody calls at a time
_START_SECONDS = 300.0  # for a fork or a thread
_STACK_SECONDS = 0.5  # for a process to write its stacks
_LONGEST, _UNLIMITED = 2.0**20, 2.0**20  # seconds, and GiB, that the system takes as limits


class TimedOut(RuntimeError):
    """The call took longer than the pool's limit, and its process was killed."""


class Died(RuntimeError):
    """The worker died twice during this call: killed, out of memory, or stack overflow."""


class Raised(RuntimeError):
    """The function raised. The message is its error, and the cause has its traceback."""


class Process:
    """A process that has loaded a function and answers calls of it. Any number of threads may ask at the same time.

    Args:
        function: "package.module:name" or "path/file.py:name". A file is loaded as OpenRLHF loads reward files. The
            function returns what JSON can hold (`reward_answers.to_json`).
        fork_gib: each call has a fork, which may allocate so many GiB on top of what the imports took. 0 for threads.
        import_seconds: that the import may take. None for no limit.
        is_quiet: drop what the process prints.

    Raises:
        TimeoutError: the import took too long.
        RuntimeError: the function cannot be loaded. The first line says why, and a traceback may follow.
    """

    def __init__(
        self, function: str, fork_gib: float = 0.0, import_seconds: float | None = None, is_quiet: bool = False
    ) -> None:
        self._forks, self._idle = bool(fork_gib), list[_Connection]()
        self._stacks = tempfile.TemporaryFile()
        self._control, theirs = socket.socketpair()
        descriptors = theirs.fileno(), self._stacks.fileno()
        arguments = os.pathsep.join(sys.path), function, fork_gib, *descriptors
        output = subprocess.DEVNULL if is_quiet else None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                start_new_session=True,  # a Ctrl-C at the terminal is for the caller, and `kill` ends the whole group
                env=without_secrets() | ({"OMP_NUM_THREADS": "1"} if self._forks else {}),
            )
        self.pid = self._process.pid
        self._control.settimeout(import_seconds)
        try:
            loaded = json.loads(_line(self._control))
        except TimeoutError:
            self.kill()
            raise TimeoutError(f"its import takes more than {import_seconds:g} s") from None
        except ConnectionError:
            loaded = {"failure": self.end()}
        if loaded["failure"]:
            self.kill()
            raise RuntimeError(f"{function.rpartition(':')[0]}: {loaded['failure']}")
        self.parameters: list[str] = loaded["parameters"]  # names of the function's

    def ask(self, args: tuple, seconds: float, patience: int = 1) -> dict:
        """Return the reply to a call: its `result`, or what it `raised` with the `traceback`.

        A thread's reply is empty if its call has asked for a signal. Only the main thread may do so, which answers the
        first connection.

        Args:
            args: what the function is called with.
            seconds: of wall-clock time that the call may take.
            patience: so many times that, while its process has had less processor time, as on a busy machine.

        Raises:
            TimeoutError: there is no reply in time. A fork is then killed.
            OSError: the process or the fork has ended.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            reply = connection.ask(args, seconds, patience)
        except TimeoutError:
            if self._forks:  # its number is still its own: the socket has just shown that it lives
                with suppress(ProcessLookupError):
                    os.kill(connection.pid, signal.SIGKILL)
            raise
        except OSError:
            self._idle.clear()  # they may have been killed, too
            raise
        self._idle.append(connection)
        return reply

    def connect(self) -> "_Connection":
        """Return a connection to a new fork or thread."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"\n"], [theirs.fileno()])
        return _Connection(ours)

    def stacks(self) -> str:
        """Return the stacks of the threads that answer a call. Python need not run for that."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        stacks = os.pread(self._stacks.fileno(), 2**20, 0).decode(errors="replace").split("\n\n")
        return "\n".join(stack for stack in stacks if " in _answer\n" in stack)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def end(self) -> str:
        """Return how the process ended, in words."""
        return f"its process ended with status {self._process.wait()}"

    def kill(self) -> None:
        """End the process and those of its group. Calls that run fail."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class _Connection:
    """A connection to a fork or a thread, on the caller's side."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        ours.settimeout(_START_SECONDS)
        self.pid = int(_line(ours))

    def ask(self, args: tuple, seconds: float, patience: int = 1) -> dict:
        seconds = min(seconds, _LONGEST)
        self._socket.settimeout(seconds)  # which ends the call of a process that does not read, too
        self._socket.sendall(pickle.dumps(args))
        begun = self._processor_seconds()
        for _ in range(patience):
            if wait([self._socket], seconds):
                return json.loads(_line(self._socket))
            if self._processor_seconds() - begun >= seconds:
                break
        raise TimeoutError

    def _processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as replies:
        line = replies.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError
    return line


class WorkerPool:
    """Calls a function in workers, which are forks of a process. Any number of threads may call it at the same time.

    Args:
        function, memory_gib: as `function` and `fork_gib` of `Process`, which the first call starts.
        workers: how many calls run at a time. The others wait.
        timeout, patience: the limits of each call, as in `Process.ask`.
    """

    def __init__(
        self, function: str, workers: int, timeout: float, memory_gib: float = _UNLIMITED, patience: int = 1
    ) -> None:
        self.function, self.timeout, self.memory_gib, self.patience = function, timeout, memory_gib, patience
        self.timed_out = self.died = 0
        self.closed = False
        self._threads = ThreadPoolExecutor(workers, "call")  # which serve the calls in their order
        self._starting = threading.Lock()
        self._process: Process | None = None

    def call(self, *args: Any) -> Any:
        """Return the function's result. A call is repeated once if its process ends before the time limit.

        Raises:
            TimedOut, Died, Raised: see there.
            RuntimeError: the function cannot be loaded, or the pool is closed.
        """
        return self._threads.submit(self._call, args).result()

    def _call(self, args: tuple) -> Any:
        for _ in range(2):
            try:
                reply = self.start().ask(args, self.timeout, self.patience)
            except TimeoutError:
                self.timed_out += 1
                raise TimedOut(f"no result after {self.timeout:g} s") from None
            except OSError:
                self.died += 1
            else:
                if "raised" in reply:
                    raise Raised(reply["raised"]) from RuntimeError(reply["traceback"])
                return reply["result"]
        raise Died("its process ended, twice")

    def start(self) -> Process:
        """Return the process, which is started if it does not run. `call` does so by itself."""
        with self._starting:
            if self.closed:
                raise RuntimeError("the pool is closed")
            if self._process is None or not self._process.is_alive():
                if self._process is not None:
                    self._process.kill()  # its forks, too
                self._process = Process(self.function, self.memory_gib)
            return self._process

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.is_alive()

    def close(self) -> None:
        """Kill the processes. Calls that run or wait fail."""
        with self._starting:
            self.closed = True
            if self._process is not None:
                self._process.kill()


# --- in the process ------------------------------------------------------------------------------------------


def main(function: str, fork_gib: str, control: str, stacks: str) -> None:
    """Answer calls until the caller closes its end of `control`, over which it sends a socket for each connection."""
    caller = socket.socket(fileno=int(control))
    caller.set_inheritable(False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)
    signals = _Signals()  # before the file takes functions out of `signal`
    call, failure = _load(function)
    loaded = {"failure": failure, "parameters": _parameters(call) if call else []}
    caller.sendall(json.dumps(loaded).encode() + b"\n")
    if not call:
        os._exit(1)
    answer = functools.partial(_answer_calls, call, function.rpartition(":")[0], signals)
    connections = _connections(caller)
    if float(fork_gib):
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork, so the kernel removes them
        for connection in connections:
            with connection:
                if os.fork() == 0:
                    caller.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the function may start processes of its own
                    _limit_memory(float(fork_gib))
                    answer(connection)
    first = next(connections)
    threading.Thread(target=ThreadPoolExecutor(_THREADS).map, args=(answer, connections)).start()
    answer(first)


def _connections(caller: socket.socket) -> Iterator[socket.socket]:
    """Yield those that the caller wants, and end the process with all its forks when the caller ends."""
    with suppress(OSError):
        while descriptors := socket.recv_fds(caller, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]:
            yield socket.socket(fileno=descriptors[0])
    os.killpg(0, signal.SIGKILL)


def _limit_memory(gib: float) -> None:
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    limit = data + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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


def _answer_calls(function: Callable, path: str, signals: _Signals, connection: socket.socket) -> None:
    """Answer calls in this thread until the caller ends, and then end this process."""
    thread, is_main = threading.get_ident(), threading.current_thread() is threading.main_thread()
    if not is_main:
        signals.threads.add(thread)
    requests: Any = connection.makefile("rb", 2**18)  # a socket holds about as much
    with suppress(OSError):
        loop = asyncio.new_event_loop()
        connection.sendall(f"{os.getpid()}\n".encode())
        while requests.peek(1):
            loop = asyncio.new_event_loop() if loop.is_closed() else loop
            asyncio.set_event_loop(loop)  # the last call may have taken it away, as asyncio.run does
            reply = _answer(function, path, requests)
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would go off here
            elif thread in signals.asking:
                signals.asking.remove(thread)
                reply = "{}"
            connection.sendall(reply.encode() + b"\n")
    os._exit(0)


def _answer(function: Callable, path: str, requests: IO[bytes]) -> str:
    try:
        return to_json({"result": function(*pickle.load(requests))})
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        return json.dumps({"raised": _message(error, path), "traceback": stack})


def _message(error: BaseException, path: str) -> str:
    """Return an error with the last line of the file that it comes from."""
    first, *rest = str(error).splitlines() or [""]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    first = f"{type(error).__name__}: {first}" + (f" (line {lines[-1]})" if lines else "")
    return "\n".join([first, *rest])


def _load(function: str) -> tuple[Callable | None, str | None]:
    """Return the function, or why there is none."""
    path, _, name = function.rpartition(":")
    try:
        module = user_files.load(path, "reward_func") if path.endswith(".py") else importlib.import_module(path)
    except BaseException as error:
        return None, f"its import fails: {_message(error, path)}\n{traceback.format_exc()}"
    if callable(found := vars(module).get(name)):
        return found, None
    own = [each for each in vars(module).values() if inspect.isfunction(each) and each.__module__ == module.__name__]
    shown = [f"{each.__name__}({', '.join(_parameters(each))})" for each in own if not each.__name__.startswith("_")]
    return None, ", but ".join([f"it has no function `{name}`", *shown[:1]])


def _parameters(function: Callable) -> list[str]:
    """Return the names of the parameters that can be given by place, as OpenRLHF gives them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is written in C
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
