"""Ends a command that is asked to end, from its first statement on: one line, and 128 + the signal's number as status.

Commands import this before anything that takes long, so it imports next to nothing itself.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FrameType

from arlopti_openrlhf import terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 30.0  # seconds that the commands which this one has started get to end


def handled() -> list[signal.Signals]:
    """Return those of `SIGNALS` that this process does not ignore, as it does SIGHUP under nohup."""
    return [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


def answer() -> None:
    """End this process at the next of `SIGNALS`, until other handlers take its place. Call it in the main thread.

    It is the first thing that a command calls, so it also opens closed standard streams and requires UTF-8.
    """
    terminal.open_streams()
    terminal.ensure_utf8()
    stderr = os.dup(2)  # DeepSpeed's import leads standard error away while it tries a compiler
    for signum in handled():
        signal.signal(signum, partial(_end, stderr))


def leave() -> None:
    """Let signals do again what they do in any Python program."""
    for signum in handled():
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def _end(stderr: int, signum: int, frame: FrameType | None) -> None:
    """Say so, end the processes below this one, and leave. A second signal does not wait for them.

    An exception would be lost where an import catches it, or come with the traceback of an import.
    """
    for other in handled():
        signal.signal(other, lambda signum, frame: os._exit(128 + signum))
    with suppress(OSError, RuntimeError):  # it may have been interrupted in the middle of a flush
        sys.stdout.flush()
    with suppress(OSError):
        before = "\n" if os.isatty(stderr) else ""  # the cursor may stand behind ^C, or behind a progress bar
        os.write(stderr, f"{before}{terminal.PREFIX}{signal.Signals(signum).name} received\n".encode())
    children = list(_children())
    for pid in children:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while children and time.monotonic() < deadline:
        time.sleep(0.02)
        children = [pid for pid in children if _is_running(pid)]
    for pid in children:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(128 + signum)


def _children() -> Iterator[int]:
    """Yield the processes that this one has started, except for those that ignore SIGTERM.

    Python's resource tracker does, and ends with this process.
    """
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, KeyError):
            with open(f"/proc/{name}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
            if int(status["PPid"]) == os.getpid() and not int(status["SigIgn"], 16) >> (signal.SIGTERM - 1) & 1:
                yield int(name)


def _is_running(pid: int) -> bool:
    """Return whether a process that this one has started still runs. One that has ended is reaped."""
    with suppress(OSError):
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    return False
