"""While vLLM starts, its log is kept for the case of a failure."""

import subprocess
import sys

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
