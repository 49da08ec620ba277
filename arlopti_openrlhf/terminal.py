"""Shows text of others, such as a model's answer or a server's error, without obeying it, on whatever output there is.

A terminal obeys escape sequences: they erase lines, change its title or hide text. A line break in such text could
begin a line that looks like one of ours.
"""

import codecs
import io
import locale
import os
import re
import sys
from typing import IO

PREFIX = "arlopti_openrlhf: "  # of our lines
# Control characters, separators that count as line breaks, what turns the reading direction, and halves of characters,
# which no output takes.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object) -> str:
    """Return a text of others as one line, with what would control the terminal as Python's escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def say(text: object, *rest: object, file: IO[str] | None = None) -> None:
    """Print a line of ours, which may quote text of others, after all that standard output has.

    Args:
        text: the line, without our prefix.
        rest: further lines that belong to it. The caller indents them.
        file: standard output unless given.
    """
    sys.stdout.flush()
    print(PREFIX + "\n".join(map(one_line, (text, *rest))), file=file, flush=True)


def indented(text: str) -> str:
    """Return a text of several lines, each of them indented, so that none looks like one of ours."""
    return re.sub(r"(?m)^(?=.)", "  ", text)


def open_streams() -> None:
    """Open standard streams that the caller has closed, to nowhere, and let them take what the locale has no code for.

    Otherwise the next files that are opened take their numbers, and get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def ensure_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if its locale has another encoding.

    PyTorch reads its own sources in the locale's encoding, so vLLM cannot be imported in one of ASCII. Output keeps
    the encoding of the locale.
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8":
        return
    shown = {"PYTHONIOENCODING": f"{sys.stdout.encoding}:backslashreplace"}
    arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, shown | os.environ | {"PYTHONUTF8": "1"})


class _Lenient(io.FileIO):
    """A file descriptor that leads to the null device once a write has failed, as on a terminal that has closed."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def lenient(descriptor: int) -> IO[str]:
    """Return a text stream to a file descriptor, to which no write fails."""
    file = io.BufferedWriter(_Lenient(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)
