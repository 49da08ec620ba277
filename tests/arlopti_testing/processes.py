"""What tests need of other processes: free ports, waits, the CPU time that they took, two ranks without Ray."""

import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CODE = """
import runpy, sys
from arlopti_openrlhf import cpu
cpu.enable()
helpers, file, function, argument = sys.argv[1:]
sys.path.append(helpers)
runpy.run_path(file)[function](argument)
"""


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    The kernel gives ports from 32768 on to whoever asks for any, which Ray does all the time.
    """
    ports = random.Random(os.urandom(8))
    while True:
        port = ports.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:  # taken
                continue
            return port


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Return whether `condition()` holds within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds)


def cpu_seconds_of_children() -> float:
    """Return the CPU time in seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
