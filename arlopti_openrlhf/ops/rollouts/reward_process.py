"""Calls a reward function in a process of its own, which can be ended when a call takes too long.

A thread cannot be ended, and code that holds Python's lock, such as a regular expression without end, would stop the
vLLM engine too. The process imports the file once and serves its calls in threads, as upstream calls the function in
threads of the engine. So a module's state is shared by all calls of an engine, and a function that waits for a service
serves many samples at a time.
"""

import faulthandler
import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from arlopti_openrlhf.grading.reward_answers import to_json
from arlopti_openrlhf.grading.worker_pool import Died, TimedOut
from arlopti_openrlhf.ops.lifecycle import awake

# The process finds modules where the engine does. With `python -m`, it would look into the working directory first.
_COMMAND = f"""
import sys
sys.path[:] = sys.argv.pop(1).split({os.pathsep!r})
from {__name__} import main
main(*sys.argv[1:])
"""
_THREADS = 32  # asyncio's default executor, which calls `call`, has no more
_STACK_SECONDS = 0.5  # for a process to write its stacks


class Raised(Exception):
    """The function raised. The message is its traceback.

    Attributes:
        summary: the type and the message of the exception.
    """

    def __init__(self, summary: str, stack: str) -> None:
        super().__init__(stack)
        self.summary = summary


class RewardProcess:
    """Calls `reward_func` of a file in a process of its own. Any number of threads may call it at the same time.

    What the function prints goes where this process's output goes. The process has no connection to Ray.

    Args:
        path: the file, which is loaded as OpenRLHF loads reward files.
        timeout: seconds of wall-clock time that a call may take. A machine that sleeps takes none.

    Raises:
        RuntimeError: the file cannot be loaded, or has no `reward_func`.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.timeout = timeout
        pairs = [socket.socketpair() for _ in range(_THREADS)]  # one for each thread of the process
        self._stacks = tempfile.TemporaryFile()
        theirs = [self._stacks.fileno(), *(pair[1].fileno() for pair in pairs)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, os.pathsep.join(sys.path), path, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            pass_fds=theirs,
            start_new_session=True,  # `kill` ends the whole group
        )
        self._free: queue.LifoQueue[Connection] = queue.LifoQueue()
        for ours, other in pairs:
            other.close()
            self._free.put(Connection(ours.detach()))
        connection = self._free.get()
        try:
            failure = json.loads(connection.recv_bytes())
        except EOFError:
            failure = self._end()
        if failure:
            self.kill()
            raise RuntimeError(f"{path}: {failure}")
        self._free.put(connection)

    def call(self, *args: Any) -> Any:
        """Return the function's result, as JSON holds it. Tensors and arrays are lists.

        Raises:
            TimedOut: the call took longer than the limit. The message ends with the stacks of all calls that run.
                They still do, until `kill`.
            Died: the process ended.
            Raised: the function raised.
        """
        connection = self._free.get()
        try:
            connection.send(args)
            if not awake.succeeds(connection.poll, self.timeout):
                limit = f"no result after {self.timeout:g} s (--reward.timeout_seconds)"
                raise TimedOut(f"{limit}, while it was here:\n{self._running()}")
            reply = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise Died(self._end()) from None
        finally:
            self._free.put(connection)
        if "raised" in reply:
            raise Raised(reply["raised"], reply["traceback"])
        return reply["result"]

    def kill(self) -> None:
        """End the process and those of its group. Calls that run raise `Died`."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _running(self) -> str:
        """Return the stacks of the calls that run. Python need not run for that."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        stacks = os.pread(self._stacks.fileno(), 2**20, 0).decode(errors="replace").split("\n\n")
        return "\n".join(stack for stack in stacks if " in _answer\n" in stack)

    def _end(self) -> str:
        return f"its process ended with status {self._process.wait()}"


# --- in the process ------------------------------------------------------------------------------------------


def _load(path: str) -> Callable:
    spec = importlib.util.spec_from_file_location("reward_func", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def _answer(function: Callable, args: tuple) -> bytes:
    try:
        return to_json({"result": function(*args)}).encode()
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        return json.dumps({"raised": f"{type(error).__name__}: {error}", "traceback": stack}).encode()


def _serve(function: Callable, connection: Connection) -> None:
    try:
        while True:
            connection.send_bytes(_answer(function, connection.recv()))
    except (EOFError, OSError):
        os._exit(0)  # the engine has ended. Other threads may still work, to no end


def main(path: str, stacks: str, *descriptors: str) -> None:
    """Serve calls of the file's `reward_func`, until the other side closes its connections.

    Args:
        path: the file.
        stacks: descriptor of the file for the stacks that SIGUSR1 asks for.
        descriptors: those of the connections. Each gets a thread.
    """
    connections = [Connection(int(descriptor)) for descriptor in descriptors]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)
    try:
        function, failure = _load(path), None
    except BaseException:
        failure = f"cannot be loaded:\n{traceback.format_exc()}"
    connections[-1].send_bytes(json.dumps(failure).encode())
    if failure:
        os._exit(1)
    threads = [threading.Thread(target=_serve, args=(function, connection)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
