"""Shows text of others, such as a model's answer or a server's error, without obeying it, on whatever output there is.

A terminal obeys escape sequences: they erase lines, change its title or hide text. A line break in such text could
begin a line that looks like one of ours.
"""

import io
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
