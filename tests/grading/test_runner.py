"""Calls in killable processes: limits that hold, and nothing lost when a process is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from arlopti_testing.processes import wait_until

from arlopti_openrlhf.grading.runner import Died, Raised, TimedOut, WorkerPool

FUNCTIONS = """
import os, signal, sys, time

def stop(*args):
    raise TimeoutError("by the function's own alarm")

signal.signal(signal.SIGALRM, stop)

def answer(what, value=None):
    if what == "own alarm":
        signal.setitimer(signal.ITIMER_REAL, value)
        while True:
            pass
    if what == "alarm that is left":
        signal.setitimer(signal.ITIMER_REAL, value)
    if what == "alarm that is cancelled":
        signal.alarm(5)
        signal.alarm(0)
        time.sleep(value)
    if what == "echo":
        return value
    if what == "pid":
        return os.getpid()
    if what == "sleep":
        time.sleep(value)
        return value
    if what == "busy in C":
        return sum(range(10**12))
    if what == "deaf":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)
    if what == "raise":
        raise ValueError(value)
    if what == "memory":
        return len(bytearray(4 * 2**30))
    if what == "recursion":
        return answer(what)
    if what == "exit":
        os._exit(3)
    if what == "die once":
        if not os.path.exists(value):
            open(value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second"
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:answer"


@pytest.fixture(scope="module")
def pool(functions):
    """The limit is far away. A machine that is busy may hold a process up for a second."""
    pool = WorkerPool(functions, workers=2, timeout=20, memory_gib=1.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def strict_pool(functions):
    pool = WorkerPool(functions, workers=2, timeout=0.5, memory_gib=1.0)
    yield pool
    pool.close()


def is_still_there(pool):
    """Whether calls are answered. One that a busy machine holds up is asked again."""
    for _ in range(10):
        with contextlib.suppress(TimedOut):
            return pool.call("echo", "next") == "next"


def test_values_pass_unchanged(pool):
    for value in (1, 0.1, "ü\n\x00\u2028", None, [1, [2.5]], {"a": [True]}, "x" * 3_000_000):
        assert pool.call("echo", value) == value


@pytest.mark.parametrize("what", ["sleep", "busy in C"])
def test_a_call_is_ended_at_its_limit(strict_pool, what):
    strict_pool.start()
    before, start = strict_pool.timed_out, time.monotonic()
    with pytest.raises(TimedOut):
        strict_pool.call(what, 30)
    assert 0.4 < time.monotonic() - start < 8 and strict_pool.timed_out == before + 1
    assert is_still_there(strict_pool)


@pytest.mark.parametrize("patience", [1, 4])
def test_a_process_that_gets_no_processor_has_more_time(functions, patience):
    """Halted for longer than the limit, as on a busy machine."""
    pool = WorkerPool(functions, workers=1, timeout=1, patience=patience)
    worker = pool.call("pid")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.call, "sleep", 0.5)
        time.sleep(0.2)
        os.kill(worker, signal.SIGSTOP)
        time.sleep(1.5)
        with contextlib.suppress(ProcessLookupError):  # it is killed at its limit
            os.kill(worker, signal.SIGCONT)
        assert (call.exception() is None) == (patience > 1)
    start = time.monotonic()
    with pytest.raises(TimedOut):
        pool.call("busy in C")
    assert time.monotonic() - start < patience + 8
    pool.close()


@pytest.mark.parametrize("what", ["deaf", "alarm that is cancelled"])
def test_no_alarm_of_the_function_lifts_the_limit(strict_pool, what):
    """Nor does the end of such a call end others."""
    template, start = strict_pool.start(), time.monotonic()
    with pytest.raises(TimedOut):
        strict_pool.call(what, 60)
    assert time.monotonic() - start < 8
    assert is_still_there(strict_pool) and strict_pool.start() is template


def test_a_functions_own_alarm_is_its_own(pool):
    """It has set the handler at its import."""
    with pytest.raises(Raised, match="TimeoutError: by the function's own alarm"):
        pool.call("own alarm", 0.2)
    pool.call("alarm that is left", 0.2)
    time.sleep(0.4)
    assert pool.call("echo", "next") == "next" and not pool.died


def test_a_caller_that_is_killed_leaves_no_worker(functions):
    code = f"""if True:
        import os, threading, time
        from arlopti_openrlhf.grading.runner import WorkerPool
        pool = WorkerPool({functions!r}, workers=2, timeout=99)
        print(pool.call("pid"), flush=True)
        threading.Thread(target=pool.call, args=["busy in C"]).start()
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    """
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert wait_until(lambda: not os.path.exists(f"/proc/{out.strip()}"))


@pytest.mark.parametrize(
    "what, name",
    [("raise", "ValueError: from here"), ("memory", "MemoryError"), ("recursion", "RecursionError")],
)
def test_what_the_function_raises_comes_with_its_traceback(pool, what, name):
    with pytest.raises(Raised, match=name) as error:
        pool.call(what, "from here")
    assert "in answer" in str(error.value.__cause__)


def test_a_process_that_ends_is_tried_twice(pool, tmp_path):
    assert pool.call("die once", str(tmp_path / "died")) == "second"
    with pytest.raises(Died):
        pool.call("exit")
    assert pool.call("echo", "next") == "next"


def test_killed_processes_lose_no_call(pool):
    """Workers and then the template, killed again and again while eight threads call."""
    stop = threading.Event()

    def kill():
        try:
            for i in range(12):
                time.sleep(0.15)
                with contextlib.suppress(ProcessLookupError, Died):
                    os.kill(pool.start().pid if i % 4 == 3 else pool.call("pid"), signal.SIGKILL)
        finally:
            stop.set()

    def call(thread):
        count = 0
        while not stop.is_set():
            try:
                assert pool.call("echo", [thread, count]) == [thread, count]
            except Died:
                pass  # killed twice: said, not dropped
            count += 1
        return count

    with ThreadPoolExecutor(9) as threads:
        killing = threads.submit(kill)
        counts = list(threads.map(call, range(8)))
    killing.result()
    assert min(counts) > 10


def test_as_many_calls_at_a_time_as_workers(pool):
    pool.call("echo", "the processes run")
    start = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: pool.call("sleep", 1), range(4)))
    assert 2 <= time.monotonic() - start < 4


def test_a_function_that_cannot_be_loaded(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    pool = WorkerPool(f"{tmp_path}/broken.py:answer", workers=1, timeout=1)
    with pytest.raises(RuntimeError, match=r"broken.py: its import fails: ZeroDivisionError.*\(line 1\)\nTraceback"):
        pool.call()


def test_modules_are_found_where_the_caller_finds_them(tmp_path):
    """The caller's `sys.path` counts, and not a working directory that is not on it."""
    script, elsewhere = tmp_path / "script.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a_function.py").write_text("raise ImportError('from the working directory')")
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "a_function.py").write_text("def double(value): return 2 * value")
    script.write_text(f"""
import sys
from arlopti_openrlhf.grading.runner import WorkerPool
sys.path.append({str(tmp_path / "added")!r})
print(WorkerPool("a_function:double", 1, timeout=5).call(21))
""")
    done = subprocess.run([sys.executable, script], cwd=elsewhere, capture_output=True, text=True, timeout=60)
    assert done.stdout == "42\n", done.stderr


def test_nothing_is_left_behind(pool):
    pool.call("echo", 0)
    process = pool.start()
    pool.close()
    assert not process.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        pool.call("echo", 0)
