"""Run commands with their output in a log, and watch how much memory they take."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
from tqdm import tqdm


class Log:
    """Runs commands with their output in one file, and shows each line to a function."""

    def __init__(self, path: Path, continues: bool = False) -> None:
        self.path = path
        if not continues:
            path.write_text("", encoding="utf-8")

    def run(self, name: str, command: Sequence[str], on_line: Callable[[str], None]) -> None:
        """Run a command, given as a list.

        Raises:
            SystemExit: the command fails. The message has its name and the end of its output.
        """
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.path, "a", encoding="utf-8") as log:
            log.write("\n$ " + " ".join(command) + "\n")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, errors="replace"
            )
            # In text mode, "\r" ends a line too, so that the command's progress bars arrive as they are drawn.
            for line in process.stdout or ():
                log.write(line)
                on_line(line)
        if process.wait() != 0:
            tail = "".join(self.path.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
            raise SystemExit(f"\n{tail}\n{name} failed with status {process.returncode}: {self.path}")

    def follow(self, command: str, flags: Sequence[str], bar: tqdm, progress: str) -> None:
        """Run a Python module, whose lines move a bar. Its end fills it.

        Args:
            command: what follows `python -m`, before the flags.
            flags: the command's.
            bar: what it moves.
            progress: a pattern. Its first group is where the bar is then, and its named groups are shown.

        Raises:
            SystemExit: as `run`.
        """

        def advance(line: str) -> None:
            if match := re.search(progress, line):
                bar.set_postfix(match.groupdict(), refresh=False)
                bar.update(max(int(match[1]) - bar.n, 0))

        # -P: a math.py in the working folder must not take the place of Python's.
        self.run(f"python -m {command}", [sys.executable, "-P", "-m", *command.split(), *flags], advance)
        bar.update(bar.total - bar.n)  # a resumed command says less


class InUse(Exception):
    """A living process holds the lock. The message is its id and its host."""


def lock(path: Path, process: int | None = None) -> IO[str]:
    """Lock a file until it is closed or this process ends, and write down which process that is.

    Args:
        process: what to write down in its place.

    Raises:
        InUse: another process holds the lock.
        OSError: the file cannot be written, or its file system has no locks.
    """
    file = open(path, "a+", encoding="utf-8")
    _take(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(f"{process or os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def look(path: Path) -> None:
    """Raise `InUse` if a process holds the lock of a file, without keeping it."""
    with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        _take(file, fcntl.LOCK_SH)


def _take(file: IO[str], kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise InUse(file.read().strip() or "that has just started") from None


class PeakMemory:
    """Watches the most memory that this process and its descendants hold at once, as the sum of their resident sets.

    That is an upper bound, because pages that several processes share are counted in each of them.
    """

    def __init__(self) -> None:
        self.gib = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        me = psutil.Process()
        while True:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with suppress(psutil.Error):  # it has ended
                    total += process.memory_info().rss
            self.gib = max(self.gib, total / 2**30)
            time.sleep(2)
