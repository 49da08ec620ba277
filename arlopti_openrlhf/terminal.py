"""Shows text of others, such as a model's answer or a server's error, without obeying it, on whatever output there is.

A terminal obeys escape sequences: they erase lines, change its title or hide text. A line break in such text could
begin a line that looks like one of ours.
"""

import io
import re
import sys
from collections.abc import Callable
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


class _Lenient(io.FileIO):
    """A file descriptor to which no write fails. It says what has been lost as soon as it can, as on a full disk."""

    _lost, _why = 0, ""  # bytes

    def write(self, data) -> int:
        try:
            if self._lost:
                self._write(f"\n{PREFIX}{self._lost} bytes of output are lost here: {self._why}\n".encode())
            self._lost = 0
            self._write(bytes(data))
        except OSError as error:
            self._lost, self._why = self._lost + len(data), str(error.strerror)
        return len(data)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[super().write(data) :]


class _Stream(io.TextIOWrapper):
    """A text stream that also gives a function what is written to it."""

    told: Callable[[str], None] | None = None

    def write(self, text: str) -> int:
        if self.told:
            self.told(text)
        return super().write(text)


def lenient(descriptor: int, told: Callable[[str], None] | None = None) -> IO[str]:
    """Return a text stream to a file descriptor, to which no write fails.

    Args:
        told: gets all that is written, too.
    """
    file = io.BufferedWriter(_Lenient(descriptor, "wb", closefd=False))
    stream = _Stream(file, "utf-8", "backslashreplace", line_buffering=True)
    stream.told = told
    return stream
