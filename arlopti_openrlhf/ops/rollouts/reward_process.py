"""Calls a reward function in threads of a process of its own, which is ended when a call takes too long.

A thread cannot be ended, and code that holds Python's lock would stop the vLLM engine too. So its threads are not the
engine's, where upstream calls the function. They share the module's state, and wait for services together. Once a call
has asked for a signal, it and all later ones are made in the process's main thread, one after another.
"""

import threading
from typing import Any

from arlopti_openrlhf import terminal
from arlopti_openrlhf.grading.runner import Process


class RewardError(Exception):
    """A sample has no usable reward, and nothing is left to try."""


class RewardTimeout(RewardError):
    """A call took too long."""


def about(query: str, label: Any) -> str:
    """Return what an error says of the sample that it concerns."""
    return f"\nlabel: {terminal.one_line(str(label)[:2000])}\nquery: {terminal.one_line(query)}"


class RewardProcess(Process):
    """Calls `reward_func` of a file. Any number of threads may call it at the same time.

    Args:
        path: the file.
        timeout: seconds of wall-clock time that a call may take.
        import_seconds, is_quiet: as in `Process`, and what it raises.
    """

    def __init__(self, path: str, timeout: float, import_seconds: float | None = None, is_quiet: bool = False) -> None:
        super().__init__(f"{path}:reward_func", import_seconds=import_seconds, is_quiet=is_quiet)
        self.path, self.timeout = path, timeout
        self._main_thread, self._turn = self.connect(), threading.Lock()
        self._needs_main_thread = False
        self._failure: RewardError | None = None  # of the call that ended the process

    def call(self, query: str, prompt: str, label: Any) -> Any:
        """Return the function's result for one sample, as JSON holds it. Tensors and arrays are lists.

        Raises:
            RewardTimeout: this call or another took longer than the limit, which ended the process. The message ends
                with the stacks of all calls that ran.
            RewardError: the function raised, or the process ended by itself.
        """
        args, kind = ([query], [prompt], [label]), RewardError
        try:
            reply = {} if self._needs_main_thread else self.ask(args, self.timeout)
            if not reply:
                self._needs_main_thread = True
                with self._turn:
                    reply = self._main_thread.ask(args, self.timeout)
            if "result" in reply:
                return reply["result"]
            problem = f"reward_func raised {reply['raised']}{about(query, label)}"
            raise RewardError(f"{self.path}: {problem}") from RuntimeError(reply["traceback"])
        except TimeoutError:
            limit = f"no result after {self.timeout:g} s (--reward.timeout_seconds)"
            kind, problem = RewardTimeout, f"reward_func gave {limit}, while it was here:\n{self.stacks()}"
        except OSError:
            problem = f"{self.end()} while it graded this sample, and perhaps others"
        # Before it is killed, because the other calls, which end with the process, name this one.
        self._failure = self._failure or kind(f"{self.path}: {problem}{about(query, label)}")
        self.kill()
        raise self._failure
