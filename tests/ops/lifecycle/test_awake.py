"""Limits do not count the time in which their process was halted."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from arlopti_openrlhf.ops.lifecycle import awake

HALTED = 3.0  # seconds
WAITS = {
    "clock": "clock = awake.Clock(1.0)\nwhile clock() < 2: time.sleep(0.1)",
    "wait": "assert not awake.succeeds(threading.Event().wait, 2.0)",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_limit_is_not_over_on_waking(wait):
    code = (
        f"import threading, time\nfrom arlopti_openrlhf.ops.lifecycle import awake\nprint('waits', flush=True)\n{wait}"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"waits\n"
    start = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(HALTED)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait() == 0
    assert time.monotonic() - start > HALTED + 0.9  # of the limit of 2 s, a second at most has gone


def test_a_wait_ends_when_it_succeeds_and_is_no_longer_than_its_limit():
    event = threading.Event()
    threading.Timer(0.3, event.set).start()
    start = time.monotonic()
    assert awake.succeeds(event.wait, 60.0) and time.monotonic() - start < 10
    waited = []
    assert not awake.succeeds(waited.append, 2.5)
    assert waited == [1.0, 1.0, 0.5]
