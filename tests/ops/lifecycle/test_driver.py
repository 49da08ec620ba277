"""The driver turns what ends a run into one line and an exit code, and answers signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from ray.exceptions import RayTaskError

from arlopti_openrlhf.ops.lifecycle import driver, stopping

FORGED = "arlopti_openrlhf: the run is complete"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Keep the driver from ending the tests' own process where Ray does not shut down in time."""
    monkeypatch.setattr(driver, "_after", lambda *_: threading.Event())


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
        (SystemExit(2), 2, ""),  # a refusal has said why
        (ValueError("\n".join("abcdefg")), 1, "arlopti_openrlhf: run failed: ValueError: a\n  b\n  ...\n  f\n  g\n"),
        # What it says of others looks like no line of ours.
        (ValueError("a\n" + FORGED), 1, f"arlopti_openrlhf: run failed: ValueError: a\n  {FORGED}\n"),
        (stopping.RunStopped("a\n" + FORGED), 1, f"arlopti_openrlhf: run stopped: a\\n{FORGED}\n"),
    ],
)
def test_the_cause_is_the_last_thing_said(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, driver.Driver().ending():
        raise error
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.endswith(line)
    # A stop is no defect: one line says it all.
    assert ("Traceback" in said) == (code == 1 and not isinstance(error, stopping.RunStopped))
    assert f"\n{FORGED}" not in said


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
import sys, threading, time
from arlopti_openrlhf.ops.lifecycle import driver, stopping
run = driver.Driver()
TRAINING = %s
stopping.is_training = lambda: TRAINING
stopping.request_stop = lambda signum: print("asked", signum, flush=True)
with run.ending():
    print("up", flush=True)
    TRAINING and threading.Timer(2, run.end, (stopping.NotResponding("saving: no progress"),)).start()
    for _ in range(600):  # a signal that comes just before a wait is handled after it
        time.sleep(0.1)
"""


def listening() -> None:
    """Ignore no signal, whatever has started the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


CLOSED = """
import os, pty, sys, threading
pid, terminal = pty.fork()
if pid:
    while b"up" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
from arlopti_openrlhf.ops.lifecycle import driver, stopping
from arlopti_openrlhf import terminal
sys.stdout, sys.stderr = terminal.lenient(1), terminal.lenient(2)
asked = threading.Event()
stopping.is_training = lambda: True
stopping.request_stop = lambda signum: asked.set()
with driver.Driver().ending():
    print("up", flush=True)
    while not asked.wait(0.1):
        pass
    for _ in range(100):
        print("lost " * 1000, flush=True)  # while it saves
    open(sys.argv[1], "w").close()
    raise stopping.Interrupted(1)
"""


def test_a_terminal_that_closes_fails_no_save(tmp_path):
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, timeout=100, preexec_fn=listening)
    assert done.returncode == 129 and (tmp_path / "saved").exists(), done.stderr


def test_under_nohup_sighup_stays_ignored():
    program = "from arlopti_openrlhf import interrupts; interrupts.answer(); " + (
        "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print([s.name for s in interrupts.handled()])"
    )
    command = ["nohup", sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=listening)
    assert done.stdout == "['SIGINT', 'SIGTERM']\n" and done.returncode == 0


@pytest.mark.parametrize(
    ("training", "signals", "code", "said"),
    [
        (False, [signal.SIGTERM], 143, "run stopped: SIGTERM received"),
        (False, [signal.SIGINT], 130, "run stopped: SIGINT received"),
        (True, [signal.SIGTERM], 4, "run stopped: saving: no progress"),
        (True, [signal.SIGINT, signal.SIGINT], 130, "SIGINT again: the run ends at once"),
        (False, [signal.SIGHUP], 129, "run stopped: SIGHUP received"),
        (True, [signal.SIGHUP], 4, "run stopped: saving: no progress"),
        # A terminal that closes sends it more than once, and a session's end SIGTERM as well.
        (True, [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM], 4, "run stopped: saving: no progress"),
    ],
)
def test_signals(training, signals, code, said):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN % training],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listening,
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signals[0])
        out = ""
        if len(signals) > 1:
            out += process.stdout.readline()
        for signum in signals[1:]:
            process.send_signal(signum)
        rest, err = process.communicate(timeout=30)
        out += rest
    assert process.returncode == code and said in err
    assert ("asked" in out) == training


def test_a_run_is_complete_though_its_temporary_folder_is_gone(tmp_path, monkeypatch, capsys):
    """Whoever tidies up TMPDIR removes what is old, during the run too."""
    monkeypatch.setattr(driver.ray, "shutdown", lambda: None)
    run = driver.Driver(closing=lambda found: "trained 2 steps")
    run.folder = tmp_path / "removed"
    with run.ending():
        pass
    said = capsys.readouterr()
    assert said.out == "trained 2 steps\n" and said.err == ""
