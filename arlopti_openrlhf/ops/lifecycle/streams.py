"""Keeps a run alive when its output goes nowhere: a closed terminal, a full disk, a reader that has ended."""

import io
import os
import sys
from contextlib import suppress

from arlopti_openrlhf import terminal


class _File(io.FileIO):
    """A file that drops what cannot be written, and counts it."""

    lost = 0  # writes
    reason = ""  # of the first

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost += 1
            if not self.reason:
                with suppress(OSError):
                    self.reason = f"{error.strerror}: {os.readlink(f'/proc/self/fd/{self.fileno()}')}"
            return len(data)


class Stream(io.TextIOWrapper):
    """A text stream to a file descriptor, line by line. No write to it fails, and none controls the terminal."""

    def __init__(self, descriptor: int) -> None:
        self.file = _File(descriptor, "wb", closefd=False)
        super().__init__(io.BufferedWriter(self.file), "utf-8", "backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        super().write(terminal.without_controls(text))
        return len(text)


def protect() -> None:
    """Let no write to this process's standard output and standard error fail from here on."""
    for name in ("stdout", "stderr"):
        if before := getattr(sys, name):
            with suppress(OSError):
                before.flush()
            setattr(sys, name, Stream(before.fileno()))


def of_run(run: object, args: object) -> None:
    """Protect the output of a run's driver."""
    protect()


def lost() -> str:
    """Return what could not be written of this process's output, or nothing."""
    files = [stream.file for stream in (sys.stdout, sys.stderr) if isinstance(stream, Stream)]
    return "; ".join(f"{file.lost} writes of output are lost ({file.reason})" for file in files if file.lost)
