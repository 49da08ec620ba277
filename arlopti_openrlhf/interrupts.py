"""Ends a command that is asked to end, from its first statement on: one line, and 128 + the signal's number as status.

Commands import this before anything that takes long, so it imports next to nothing itself.
"""

import os
import signal
import sys
import time
from collections.abc import Collection
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

    It is the first thing that a command calls.
    """
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
    trackers = set()
    for child in children():
        with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as line:
            if b"resource_tracker" in line.read():  # it ignores SIGTERM, and ends with us
                trackers.add(child)
            else:
                os.kill(child, signal.SIGTERM)
    end_children(_PATIENCE, trackers)
    os._exit(128 + signum)


def children() -> list[int]:
    """Return the ids of this process's children. An import that a signal has interrupted could not find them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def end_children(seconds: float, others: Collection[int] = ()) -> None:
    """Wait so many seconds for this process's children to end, and kill those that are left.

    If this process inherits orphans, as a subreaper does, they are children of it too, so every descendant ends.

    Args:
        others: children that stay.
    """
    since = time.monotonic()
    while time.monotonic() < since + seconds + _PATIENCE:  # the kernel may not let a process go
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = set(children()).difference(others)
        if not left:
            return
        if time.monotonic() >= since + seconds:
            for child in left:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
