"""Calls a reward function in a process of its own, which can be ended when a call takes too long.

A thread cannot be ended, and code that holds Python's lock, such as a regular expression without end, would stop the
vLLM engine too. The process imports the file once and serves its calls in threads, as upstream calls the function in
threads of the engine. So a module's state is shared by all calls of an engine, and a function that waits for a service
serves many samples at a time.
"""

import faulthandler
import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from arlopti_openrlhf.grading.environment import without_secrets
from arlopti_openrlhf.grading.reward_answers import to_json
from arlopti_openrlhf.ops.lifecycle import awake

# Why not an actor of Ray? Measured with 2.55: its process sees no GPU, since CUDA_VISIBLE_DEVICES is emptied for an
# actor without one. Ray does not know the exit status, and answers a file that cannot be imported with a crash of the
# worker. A call took 0.9 ms and the process 128 MB, where this one takes 0.06 ms and 16 MB.

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


def about(query: str, label: Any) -> str:
    """Return what an error says of the sample that it concerns."""
    return f"\nlabel: {str(label)[:2000]}\nquery: {query}"


class RewardProcess:
    """Calls `reward_func` of a file in a process of its own. Any number of threads may call it at the same time.

    What the function prints goes where this process's output goes. The process has no connection to Ray.

    Args:
        path: the file.
        timeout: seconds of wall-clock time that a call may take. A machine that sleeps takes none.

    Raises:
        RuntimeError: the file cannot be loaded, or has no `reward_func`.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path, self.timeout = path, timeout
        self._failure: RewardError | None = None  # of the call that ended the process
        self._stacks = tempfile.TemporaryFile()
        pipes = [Pipe() for _ in range(_THREADS)]  # one for each thread of the process
        theirs = [self._stacks.fileno(), *(end.fileno() for _, end in pipes)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, os.pathsep.join(sys.path), path, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            pass_fds=theirs,
            env=without_secrets(),
            start_new_session=True,  # `kill` ends the whole group
        )
        self._free: queue.LifoQueue[Connection] = queue.LifoQueue()
        for ours, end in pipes:
            end.close()
            self._free.put(ours)
        try:
            failure = json.loads(ours.recv_bytes())
        except EOFError:
            failure = self._end()
        if failure:
            self.kill()
            raise RuntimeError(f"{path}: {failure}")

    def call(self, query: str, prompt: str, label: Any) -> Any:
        """Return the function's result for one sample, as JSON holds it. Tensors and arrays are lists.

        Raises:
            RewardError: the function raised, or the process ended: by itself, or because this call or another took
                longer than the limit. That message ends with the stacks of all calls that ran.
        """
        connection = self._free.get()
        try:
            connection.send(([query], [prompt], [label]))
            if awake.succeeds(connection.poll, self.timeout):
                reply = json.loads(connection.recv_bytes())
                if "raised" not in reply:
                    return reply["result"]
                cause = f"{self.path}: reward_func raised {reply['raised']}{about(query, label)}"
                raise RewardError(cause) from RuntimeError(reply["traceback"])
            limit = f"no result after {self.timeout:g} s (--reward.timeout_seconds)"
            cause = f"reward_func gave {limit}, while it was here:\n{self._running()}"
        except (EOFError, OSError):
            cause = f"{self._end()} while it graded this sample, and perhaps others"
        finally:
            self._free.put(connection)
        # Before it is killed, because the other calls, which end with the process, name this one.
        self._failure = self._failure or RewardError(f"{self.path}: {cause}{about(query, label)}")
        self.kill()
        raise self._failure

    def kill(self) -> None:
        """End the process and those of its group. Calls that run fail."""
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
        function, failure = runpy.run_path(path, run_name="reward_func")["reward_func"], None
    except BaseException:
        failure = f"cannot be loaded:\n{traceback.format_exc()}"
    connections[-1].send_bytes(json.dumps(failure).encode())
    if failure:
        os._exit(1)
    with ThreadPoolExecutor(len(connections)) as threads:
        list(threads.map(partial(_serve, function), connections))
