"""The driver turns what ends a run into one line and an exit code, and answers signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from ray.exceptions import RayTaskError

from arlopti_openrlhf.run import driver, stopping


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Keep the driver from ending the tests' own process where Ray does not shut down in time."""
    monkeypatch.setattr(driver, "_leave_within", lambda seconds, code, last=None: threading.Timer(seconds, print))


def wrapped(error: Exception) -> RayTaskError:
    """Return `error` as `ray.get` raises it on the driver, after two actors."""
    inner = RayTaskError("generate", "the traceback there", error).as_instanceof_cause()
    return RayTaskError("fit", "the traceback there", inner).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (wrapped(stopping.Diverged("loss nan")), 3, "arlopti_openrlhf: run stopped: loss nan\n"),
        (wrapped(stopping.NotResponding("engine 0")), 4, "arlopti_openrlhf: run stopped: engine 0\n"),
        (wrapped(stopping.Interrupted(15)), 143, "arlopti_openrlhf: run stopped: SIGTERM received\n"),
        (wrapped(ValueError("no label")), 1, "arlopti_openrlhf: run failed: ValueError: no label\n"),
        (ValueError("\n".join("abcdefg")), 1, "arlopti_openrlhf: run failed: ValueError: a\nb\n...\nf\ng\n"),
    ],
)
def test_the_cause_is_the_last_thing_said(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, driver.Driver().ending():
        raise error
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.endswith(line)
    assert ("Traceback" in said) == (code == 1)  # a stop is no defect: one line says it all


def test_refusals_pass():
    with pytest.raises(SystemExit) as ended, driver.Driver().ending():
        sys.exit(2)
    assert ended.value.code == 2


def test_a_cause_from_another_thread_ends_a_wait():
    run = driver.Driver()
    with pytest.raises(SystemExit) as ended, run.ending():
        threading.Timer(0.2, run.end, (stopping.NotResponding("the engine has died"),)).start()
        threading.Event().wait(30)
    assert ended.value.code == 4


def test_a_cause_that_comes_late_changes_nothing(monkeypatch):
    """The watch over the actors sees them end when the run is complete."""
    interrupted = []
    monkeypatch.setattr(signal, "pthread_kill", lambda *sent: interrupted.append(sent))
    run = driver.Driver()
    with run.ending():
        pass
    run.end(stopping.NotResponding("engine 0 has ended"))
    assert not interrupted


RUN = """
import sys, threading
from arlopti_openrlhf.run import driver, stopping
run = driver.Driver()
run.stall_minutes = %s
TRAINING = %s
driver.ray.is_initialized = lambda: True
stopping.is_training = lambda: TRAINING
stopping.request_stop = lambda signum: print("asked", signum, flush=True)
with run.ending():
    print("up", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    ("training", "signals", "code", "said"),
    [
        (False, [signal.SIGTERM], 143, "run stopped: SIGTERM received"),
        (False, [signal.SIGINT], 130, "run stopped: SIGINT received"),
        (True, [signal.SIGTERM], 143, "no checkpoint in 0.0166667 minutes"),
        (True, [signal.SIGINT, signal.SIGINT], 130, "SIGINT again: the run ends at once"),
    ],
)
def test_signals(training, signals, code, said):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN % (1 / 60 if len(signals) == 1 else 1, training)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signals[0])
        out = ""
        for signum in signals[1:]:
            out += process.stdout.readline()
            process.send_signal(signum)
        rest, err = process.communicate(timeout=30)
        out += rest
    assert process.returncode == code
    assert said in err
    assert ("asked" in out) == training
