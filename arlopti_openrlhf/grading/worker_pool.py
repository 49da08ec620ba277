"""Calls a function in processes that can be killed, which bounds what hostile input costs in time and in memory.

A template process imports the function once and forks workers from itself, each on a socket of its own. When a
worker's time is up, the kernel ends it by the default action of its interval timer, which no code of the worker can
delay. The template tells the caller, and forks the next worker in milliseconds. The sockets carry JSON, never pickle.
"""

import atexit
import gc
import importlib
import importlib.util
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from arlopti_openrlhf.grading.reward_answers import to_json

# Why not pebble's ProcessPool, as fast with eight callers? Measured with 5.2.3, two workers from a fork server
# and a limit of 0.5 s. A call that was busy in C ended after 3.6 s, and calls of the other worker waited for 3 s of
# them, because pebble sends SIGTERM and waits with its one channel locked. (With that wait set to 0 both took 0.6 s.)
# An idle worker that was killed from outside, as when memory runs out, broke the pool for good. This pool lost none of
# 46,000 calls in 100 kills. And pebble would unpickle what a process sends that has just read a model's answer.

# The template finds modules where the caller does. With `python -m`, it would look into the working directory first.
_TEMPLATE = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from {__name__} import main; main(sys.argv[1:])"
)
_START_SECONDS = 300  # to import the function; only the first call waits for it
_DIGITS = 18  # of a request's number, which stands before its arguments
_GRACE_SECONDS = 10  # after its limit, how long a call waits for a worker that the kernel did not end
_ASLEEP_SECONDS = 5  # a limit that is noticed so much too late ran out while the machine slept


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

    Raises:
        RuntimeError: at the first call, when the function cannot be loaded.
    """

    def __init__(self, function: str, workers: int, timeout: float, memory_gib: float = 2.0) -> None:
        self.function, self.workers, self.timeout, self.memory_gib = function, workers, timeout, memory_gib
        self.timed_out = self.died = 0
        # One thread per worker serves the calls in their order, however many wait.
        slots = iter(range(workers))
        self._thread = threading.local()
        self._threads = ThreadPoolExecutor(workers, "call", lambda: setattr(self._thread, "slot", next(slots)))
        self._template: _Template | None = None
        self._lock = threading.Lock()
        self._closed = False
        atexit.register(self.close)

    def call(self, *args: Any) -> Any:
        """Return the function's result.

        A call is repeated once if its process ended for another reason than its time limit, or if its time ran out
        while the machine slept.

        Raises:
            TimedOut, Died, Raised: see there.
            RuntimeError: the function could not be loaded, or the pool is closed.
        """
        return self.submit(*args).result()

    def submit(self, *args: Any) -> Future:
        """Start a call, and do not wait for it."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        return self._threads.submit(self._call, args)

    def _call(self, args: tuple) -> Any:
        for is_last in (False, True):
            template, start, limit = self.start(), time.monotonic(), self.timeout
            try:
                reply = template.ask(self._thread.slot, args, self.timeout + _GRACE_SECONDS)
            except (OSError, ValueError) as error:  # the worker is stuck, or all are gone
                reply = {"ended": "timed_out" if isinstance(error, TimeoutError) else "died"}
                limit += _GRACE_SECONDS
                template.kill()
            if "raised" in reply:
                raise Raised(reply["raised"])
            if "result" in reply:
                return reply["result"]
            if reply["ended"] == "timed_out":
                if time.monotonic() - start > limit + _ASLEEP_SECONDS and not is_last:
                    continue
                self.timed_out += 1
                raise TimedOut(f"no result after {self.timeout:g} s")
            self.died += 1
        raise Died("the process that ran the call ended, twice")

    def start(self) -> "_Template":
        """Start the processes if none run. `call` does so by itself."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._template is None or not self._template.is_alive():
                if self._template is not None:
                    self._template.kill()
                self._template = _Template(self)
            return self._template

    def is_alive(self) -> bool:
        """Return whether the processes run."""
        return self._template is not None and self._template.is_alive()

    def close(self) -> None:
        """Kill the processes. Calls that run or wait fail."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            if self._template is not None:
                self._template.kill()
        atexit.unregister(self.close)


class _Template:
    """Talks to a template process and its workers, on the caller's side."""

    def __init__(self, pool: WorkerPool) -> None:
        pairs = [socket.socketpair() for _ in range(pool.workers)]
        theirs = [pair[1] for pair in pairs]
        command = [sys.executable, "-c", _TEMPLATE, os.pathsep.join(sys.path)]
        command += [pool.function, str(pool.timeout), str(pool.memory_gib)]
        self.process = subprocess.Popen(
            command + [str(s.fileno()) for s in theirs],
            stdin=subprocess.DEVNULL,
            pass_fds=[s.fileno() for s in theirs],
            start_new_session=True,  # a Ctrl-C at the terminal is for the caller, and `kill` ends the whole group
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for s in theirs:
            s.close()
        self.killed = False
        self.sockets = [pair[0] for pair in pairs]
        self.files = [s.makefile("rb") for s in self.sockets]
        self.requests = itertools.count(1)
        self.sockets[0].settimeout(_START_SECONDS)
        if not self.files[0].readline():
            self.kill()
            raise RuntimeError(f"{pool.function} could not be loaded: see the traceback above")

    def ask(self, slot: int, args: tuple, seconds: float) -> dict:
        """Return the reply of the slot's worker. OSError or ValueError where there will be none."""
        request = next(self.requests)
        self.sockets[slot].settimeout(seconds)
        self.sockets[slot].sendall(b"%0*d%s\n" % (_DIGITS, request, json.dumps(args).encode()))
        while True:
            line = self.files[slot].readline()
            if not line:
                raise ConnectionResetError
            reply = json.loads(line)
            # Other replies come twice, or from a worker that died after its answer.
            if reply["request"] == request:
                return reply

    def is_alive(self) -> bool:
        # While another thread waits for the end of a process, `poll` returns None even if it has ended.
        return not self.killed and self.process.poll() is None

    def kill(self) -> None:
        self.killed = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


# --- in the template process ---------------------------------------------------------------------------------


def _load(function: str) -> Callable:
    module, _, name = function.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("reward_func", module)
    if spec is None or spec.loader is None or not os.path.exists(module):
        raise FileNotFoundError(module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def _run_template(function: str, timeout: float, memory_gib: float, descriptors: list[int]) -> None:
    call = _load(function)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    # The number of the request that each worker is at. The memory is shared, so it outlives the worker.
    current = [mmap.mmap(-1, 8) for _ in sockets]
    gc.freeze()

    def fork(slot: int) -> int:
        pid = os.fork()
        if pid == 0:
            for i, other in enumerate(sockets):
                if i != slot:
                    other.close()
            status = 1
            try:
                _serve(call, sockets[slot], current[slot], timeout, memory_gib)
                status = 0
            finally:
                os._exit(status)
        return pid

    slots = {fork(slot): slot for slot in range(len(sockets))}
    _send(sockets[0], {"ready": True})
    while slots:
        pid, status = os.wait()
        slot = slots.pop(pid)
        if status == 0:
            continue  # the caller has closed its end
        request = struct.unpack("q", current[slot][:])[0]
        if request:
            current[slot][:] = bytes(8)
            ended = "timed_out" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "died"
            try:
                _send(sockets[slot], {"request": request, "ended": ended})
            except OSError:
                continue
        slots[fork(slot)] = slot


def _serve(call: Callable, connection: socket.socket, current: mmap.mmap, timeout: float, memory_gib: float) -> None:
    """Answer requests in a worker, until the caller closes its end."""
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    limit = data + int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request, args in _requests(connection, current):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            message = to_json({"result": call(*args), "request": request})
        except (Exception, KeyboardInterrupt, SystemExit):
            message = json.dumps({"raised": traceback.format_exc(), "request": request})
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(message.encode() + b"\n")
        current[:] = bytes(8)


def _requests(connection: socket.socket, current: mmap.mmap) -> Iterator[tuple[int, list]]:
    """Yield requests, until the caller closes its end.

    Each is noted in `current` before any of it leaves the socket. If its worker is killed in between, the next worker
    finds the request, or the template knows of it.
    """
    while number := connection.recv(_DIGITS, socket.MSG_PEEK | socket.MSG_WAITALL):
        if not number.isdigit():  # the rest of a request, whose first part a killed worker had read
            _read_line(connection)
            continue
        current[:] = struct.pack("q", int(number))
        yield int(number), json.loads(_read_line(connection)[_DIGITS:])


def _read_line(connection: socket.socket) -> bytearray:
    """Read one line, and not a byte of the next, which may be another worker's."""
    line = bytearray()
    while not line.endswith(b"\n") and (part := connection.recv(2**16, socket.MSG_PEEK)):
        line += connection.recv(part.find(b"\n") + 1 or len(part))
    return line


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def main(argv: list[str]) -> None:
    """Run the template. `argv` is the function, its two limits, and a socket's descriptor for each worker."""
    function, timeout, memory_gib, *descriptors = argv
    _run_template(function, float(timeout), float(memory_gib), [int(descriptor) for descriptor in descriptors])
