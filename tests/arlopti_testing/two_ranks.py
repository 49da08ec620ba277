"""Runs a function of a test file on two ranks, each in a process of its own, without Ray."""

import os
import subprocess
import sys
from pathlib import Path

from arlopti_testing.ports import free_port

CODE = """
import runpy, sys
from arlopti_openrlhf import cpu
cpu.enable()
helpers, file, function, argument = sys.argv[1:]
sys.path.append(helpers)
runpy.run_path(file)[function](argument)
"""


def errors_on_two_ranks(file: str, function: str, argument: str) -> str:
    """Call `function(argument)` of a Python file on both ranks, with the variables that `init_distributed` reads.

    Returns:
        What both ranks wrote to stderr, if one of them ended with an error; else nothing.
    """
    port = free_port()
    common = dict(os.environ, WORLD_SIZE="2", LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(Path(__file__).parents[1]), file, function, argument],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return "\n".join(errors) if any(rank.returncode for rank in ranks) else ""
