"""While vLLM or a training starts, its log is kept for the case of a failure, and a clock runs."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

QUIET = """
import os, subprocess, sys
from arlopti_openrlhf.lab.scoring.waiting import quiet
try:
    with quiet():
        subprocess.run(["echo", "of the engine"])
        os.write(2, b"of C++\\n")
        from vllm.logger import init_logger
        init_logger("vllm.engine").info("of its logger")
        print("for the user")
        if sys.argv[1:]:
            raise ValueError("no engine")
finally:
    print("after it")
"""


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.long), True])
def test_vllms_log_is_shown_only_if_it_fails(fails):
    done = subprocess.run([sys.executable, "-c", QUIET, *(["fail"] * fails)], capture_output=True, text=True)
    assert done.stdout == "for the user\nafter it\n"
    if fails:
        assert done.returncode == 1 and done.stderr.startswith("of the engine\nof C++\nINFO ")
        assert "of its logger\n\nTraceback" in done.stderr
        assert done.stderr.endswith("ValueError: no engine\n")
    else:
        assert (done.returncode, done.stderr) == (0, "")


TICKING = """
import time
from tqdm import tqdm
from arlopti_openrlhf.lab.scoring.waiting import ticking
with tqdm(total=100, desc="training") as bar, ticking(bar):
    time.sleep(2.5)
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_ticks_on_a_terminal(is_terminal):
    outer, inner = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", TICKING], stderr=inner)
    os.close(inner)
    parts = []
    with suppress(OSError):  # a terminal ends so
        while part := os.read(outer, 10_000):
            parts.append(part)
    os.close(outer)
    assert process.wait(60) == 0
    assert (b"[00:01<" in b"".join(parts)) == is_terminal
