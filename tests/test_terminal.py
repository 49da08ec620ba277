"""Text of others neither controls a terminal nor looks like a line of ours."""

import os
import resource
import sys

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.lifecycle import console
from arlopti_openrlhf.ops.preflight.finding import Finding

HOSTILE = "\x1b[2J\x1b]0;title\x07\r\narlopti_openrlhf: run complete\x9b1A\u2028\u202eend"


def test_a_text_of_others_is_one_line():
    shown = terminal.one_line(HOSTILE)
    assert shown == r"\x1b[2J\x1b]0;title\x07\r\narlopti_openrlhf: run complete\x9b1A\u2028\u202eend"
    assert terminal.one_line("α, 中文 and 👩‍💻 stay") == "α, 中文 and 👩‍💻 stay"


def test_a_line_of_ours_is_one_line_on_any_output(capsys):
    """Half a character, as JSON may hold, is in no encoding."""
    terminal.say(f"it says {HOSTILE}\ud800\u200f")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("arlopti_openrlhf: it says \\x1b[2J") and line.endswith(r"\u202eend\ud800\u200f")
    terminal.say("two problems", f"  {HOSTILE}", "  the other", file=sys.stderr)
    first, second, third = capsys.readouterr().err.splitlines()
    assert (first, third) == ("arlopti_openrlhf: two problems", "  the other") and second.startswith("  \\x1b[2J")


def test_no_write_fails_and_what_is_lost_is_said(tmp_path):
    """The disk is full for a moment, or the file may not grow, which the kernel tells a program in the same way."""
    with open(tmp_path / "log", "w") as file:
        stream = terminal.lenient(file.fileno())
        stream.write("read\n")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
        try:
            stream.write("lost\n")
            stream.write("lost too\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        stream.write("back\n")
    said = "arlopti_openrlhf: 14 bytes of output are lost here: File too large"
    assert (tmp_path / "log").read_text() == f"read\n\n{said}\nback\n"


def test_a_terminal_that_has_closed_takes_everything():
    outer, inner = os.pipe()
    stream = terminal.lenient(inner)
    os.close(outer)
    assert [stream.write("lost\n") for _ in range(2)] == [5, 5]
    os.close(inner)


def test_a_finding_is_one_line_whatever_it_quotes():
    found = str(Finding("--data.prompt_dataset", "data", f"row 1: {HOSTILE}", "mend it"))
    assert len(found.splitlines()) == 1 and found.isprintable()


def test_the_lines_of_an_error_are_none_of_the_packages():
    """The console shows the user the package's lines, and those of loggers."""
    text = terminal.indented(
        "arlopti_openrlhf: done\n(Actor pid=1) arlopti_openrlhf: done\nWARNING 07-24 10:00:00 a.py:1] x"
    )
    assert [console.for_the_user(line) for line in text.split("\n")] == [None] * 3
