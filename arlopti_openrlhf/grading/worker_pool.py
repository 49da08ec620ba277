"""Calls a function in processes that can be killed, which bounds what hostile input costs in time and in memory.

A template process imports the function once and forks workers from itself, which takes milliseconds. Each worker has a
socket of its own to the caller, which carries JSON, never pickle. It calls the function in its main thread, so signals
and the interval timer are the function's. When a call's time is up, the caller kills the worker, which no code of the
worker can delay, and takes another one for its next call.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from arlopti_openrlhf import user_files
from arlopti_openrlhf.grading.environment import without_secrets
from arlopti_openrlhf.grading.reward_answers import to_json

# Why not pebble's ProcessPool, as fast with eight callers? Measured with 5.2.3, two workers from a fork server
# and a limit of 0.5 s. A call that was busy in C ended after 3.6 s, and calls of the other worker waited for 3 s of
# them, because pebble sends SIGTERM and waits with its one channel locked. (With that wait set to 0 both took 0.6 s.)
# An idle worker that was killed from outside, as when memory runs out, broke the pool for good. This pool lost none of
# 35,000 calls in 100 kills. And pebble would unpickle what a process sends that has just read a model's answer.

# The template finds modules where the caller does. With `python -m`, it would look into the working directory first.
_TEMPLATE = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from {__name__} import main; main(sys.argv[1:])"
)
_START_SECONDS = 300  # to import the function; only the first call waits for it


class TimedOut(Exception):
    """The call took longer than the pool's limit, and its process was killed."""


class Died(Exception):
    """The worker died twice during this call: killed, out of memory, or stack overflow."""


class Raised(Exception):
    """The function raised. The message is its traceback."""


class WorkerPool:
    """Calls a function in worker processes. Any number of threads may call it at the same time.

    Args:
        function: "package.module:name" or "path/file.py:name". A file is loaded as OpenRLHF loads reward files. The
            function takes and returns what JSON can hold (`reward_answers.to_json`).
        workers: how many calls run at a time. The others wait.
        timeout: seconds of wall-clock time that a call may take.
        memory_gib: GiB that a worker may allocate on top of what its imports took.
        patience: how many times its timeout a call may take on a busy machine, as long as its process has had less
            than one of processor time.

    Raises:
        RuntimeError: at the first call, when the function cannot be loaded.
    """

    def __init__(
        self, function: str, workers: int, timeout: float, memory_gib: float = 2.0, patience: int = 1
    ) -> None:
        self.function, self.timeout, self.memory_gib, self.patience = function, timeout, memory_gib, patience
        self.timed_out = self.died = 0
        # They serve the calls in their order, however many wait.
        self._threads = ThreadPoolExecutor(workers, "call")
        self._template: _Template | None = None
        self._lock = threading.Lock()
        self.closed = False
        atexit.register(self.close)

    def call(self, *args: Any) -> Any:
        """Return the function's result.

        A call is repeated once if its process ended for another reason than its time limit.

        Raises:
            TimedOut, Died, Raised: see there.
            RuntimeError: the function could not be loaded, or the pool is closed.
        """
        return self.submit(*args).result()

    def submit(self, *args: Any) -> Future:
        """Start a call, and do not wait for it."""
        if self.closed:
            raise RuntimeError("the pool is closed")
        return self._threads.submit(self._call, args)

    def _call(self, args: tuple) -> Any:
        for is_last in (False, True):
            try:
                # Idle workers may have been killed in the meantime. A new one is not idle.
                reply = self.start().ask(args, self.timeout, self.patience, is_new=is_last)
            except TimeoutError:
                self.timed_out += 1
                raise TimedOut(f"no result after {self.timeout:g} s") from None
            except OSError:
                self.died += 1
            else:
                if "raised" in reply:
                    raise Raised(reply["raised"])
                return reply["result"]
        raise Died("the process that ran the call ended, twice")

    def start(self) -> "_Template":
        """Start the template if it does not run. `call` does so by itself."""
        with self._lock:
            if self.closed:
                raise RuntimeError("the pool is closed")
            if self._template is None or not self._template.is_alive():
                if self._template is not None:
                    self._template.kill()
                self._template = _Template(self)
            return self._template

    def is_alive(self) -> bool:
        """Return whether the template runs."""
        return self._template is not None and self._template.is_alive()

    def close(self) -> None:
        """Kill the processes. Calls that run or wait fail."""
        with self._lock:
            self.closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            if self._template is not None:
                self._template.kill()
        atexit.unregister(self.close)


class _Template:
    """A template process and its workers, on the caller's side."""

    def __init__(self, pool: WorkerPool) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", _TEMPLATE, os.pathsep.join(sys.path)]
        command += [pool.function, str(pool.memory_gib), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for the caller, and `kill` ends the whole group
                env=without_secrets() | {"OMP_NUM_THREADS": "1"},
            )
        self.killed = False
        self.idle: list[_Worker] = []
        self.socket.settimeout(_START_SECONDS)
        with suppress(TimeoutError):
            if self.socket.recv(1):
                return
        self.kill()
        raise RuntimeError(f"{pool.function} could not be loaded: see the traceback above")

    def ask(self, args: tuple, seconds: float, patience: int, is_new: bool) -> dict:
        """Return the reply of an idle worker, or of a new one.

        Raises:
            TimeoutError: there is none in time, and the worker is killed.
            OSError: the worker has ended.
        """
        try:
            worker = self._fork() if is_new else self.idle.pop()
        except IndexError:
            worker = self._fork()
        try:
            reply = worker.ask(args, seconds, patience)
        except TimeoutError:
            worker.kill()
            raise
        self.idle.append(worker)
        return reply

    def _fork(self) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.socket, [b"\n"], [theirs.fileno()])
        return _Worker(ours)

    def is_alive(self) -> bool:
        # While another thread waits for the end of a process, `poll` returns None even if it has ended.
        return not self.killed and self.process.poll() is None

    def kill(self) -> None:
        self.killed = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class _Worker:
    """A worker process, on the caller's side."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(_START_SECONDS)
        self.pid = int(self._line())

    def ask(self, args: tuple, seconds: float, patience: int) -> dict:
        self.socket.settimeout(seconds)
        self.socket.sendall(json.dumps(args).encode() + b"\n")
        reply, begun = select.poll(), self._processor_seconds()
        reply.register(self.socket, select.POLLIN)
        for _ in range(patience):
            if reply.poll(min(1000 * seconds, 2**31 - 1)):
                return json.loads(self._line())
            if self._processor_seconds() - begun >= seconds:
                break
        raise TimeoutError

    def _processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        # Its number is still its own: the socket has just shown that it lives.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _line(self) -> bytes:
        with self.socket.makefile("rb") as replies:
            line = replies.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError
        return line


# --- in the template process ---------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Run the template. `argv` is the function, its limit of memory, and the descriptor of the caller's socket."""
    function, memory_gib, descriptor = argv
    call = _load(function)
    caller = socket.socket(fileno=int(descriptor))
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the template waits for no worker, so the kernel removes them
    caller.sendall(b"\n")
    # The caller sends the socket of each worker that it wants, and in the end closes its own.
    while descriptors := socket.recv_fds(caller, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                caller.close()
                try:
                    _serve(call, connection, float(memory_gib))
                finally:
                    os._exit(0)
    os.killpg(0, signal.SIGKILL)  # the caller has ended. Workers may still work, to no end


def _load(function: str) -> Callable:
    module, _, name = function.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    return getattr(user_files.load(module, "reward_func"), name)


def _serve(call: Callable, connection: socket.socket, memory_gib: float) -> None:
    """Answer requests in a worker, until the caller closes its end."""
    connection.sendall(f"{os.getpid()}\n".encode())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the function may start processes of its own
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    limit = data + int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request in connection.makefile("rb", 2**18):  # a socket holds about as much
        args = json.loads(request)
        try:
            message = to_json({"result": call(*args)})
        except (Exception, KeyboardInterrupt, SystemExit):
            message = json.dumps({"raised": traceback.format_exc()})
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would go off here
        connection.sendall(message.encode() + b"\n")
