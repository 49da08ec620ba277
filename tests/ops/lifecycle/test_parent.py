"""The parent of a run gets the signals, asks the run to stop, and ends what the run leaves. A script trains here."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from arlopti_testing.processes import wait_until

SCRIPT = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
from arlopti_openrlhf.ops.lifecycle import parent

folder = Path(sys.argv[1])
parent._PAUSE, parent._REST = 0, 0.5

def begin(child, **more):
    child.report(log="", folder=str(folder), **more)

def train_on(child):
    child.report(found={}, has_ray=True, is_training=True)
    print("up", flush=True)

def leave_a_process():
    # A daemon: nobody's child any more, and in a session of its own.
    subprocess.Popen(["setsid", "sh", "-c", "sleep 300 & echo $! > daemon; wait"], cwd=folder)
    while not (folder / "daemon").exists() or not (folder / "daemon").read_text():
        time.sleep(0.01)

def train(child, again):
    (folder / "child").write_text(str(os.getpid()))
    BODY

def how_to_go_on():
    if (folder / "stale").exists():
        raise OSError(116, "Stale file handle")
    return "checkpoint: step 7"

sys.exit(parent.Parent(LIMIT, RESTARTS, how_to_go_on).run(train))
"""
# Saves when it is asked to, which takes some time.
SAVES = """
    begin(child)
    leave_a_process()
    train_on(child)
    asked = child.wait_for_request()
    print("saves", flush=True)
    time.sleep(2)
    (folder / "saved").touch()
    child.say_last(128 + asked, "arlopti_openrlhf: run stopped: it has saved")
"""
DEAF = "begin(child); leave_a_process(); train_on(child); time.sleep(100)"


def script(tmp_path, body: str, limit: float = 60, restarts: int = 0) -> list[str]:
    text = SCRIPT.replace("BODY", body.strip()).replace("LIMIT", str(limit)).replace("RESTARTS", str(restarts))
    (tmp_path / "script.py").write_text(text)
    return [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]


def listening() -> None:
    """Ignore no signal, whatever has started the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def lives(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
        return True
    except ProcessLookupError:
        return False


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("begin(child); child.say_last(0, 'what came out')", 0, "what came out\n", ""),
        ("sys.exit(2)", 2, "", ""),  # it has been refused, and has said why
        ("begin(child); child.say_last(3, 'diverged')", 3, "", "diverged\n"),
        ("begin(child); child.say_last(1, 'failed')", 1, "", "failed\narlopti_openrlhf: checkpoint: step 7\n"),
        ("begin(child); child.say_last(3, 2**20 * 'ü')", 3, "", 2**16 * "ü" + "\n"),
        ("begin(child); (folder / 'stale').touch(); child.say_last(1, 'failed')", 1, "", "failed\n"),
        (
            "begin(child); os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "",
            "arlopti_openrlhf: run failed: SIGKILL has ended its driver\narlopti_openrlhf: checkpoint: step 7\n",
        ),
    ],
)
def test_how_a_run_ends(body, code, out, err, tmp_path):
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_run_that_stands_still_is_ended_with_all_that_it_has_started(tmp_path):
    done = subprocess.run(script(tmp_path, DEAF, 0.05), capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "run stopped: the start: no progress for 0.05 minutes (--train.stall_minutes)\n" in done.stderr
    assert not lives(tmp_path / "child") and not lives(tmp_path / "daemon")


class Terminal:
    """A command in the foreground of a real terminal."""

    def __init__(self, command: list[str]) -> None:
        self.text, self.is_open = "", True
        self.pid, self.descriptor = pty.fork()
        if not self.pid:
            listening()
            os.execv(command[0], command)

    def wait_for(self, text: str) -> None:
        while text not in self.text:
            self.text += os.read(self.descriptor, 1000).decode()

    def type(self, key: str) -> None:
        os.write(self.descriptor, key.encode())

    def status(self) -> int:
        """Return the exit status of the command once it ends."""
        if self.is_open:
            try:
                while data := os.read(self.descriptor, 1000):
                    self.text += data.decode()
            except OSError:  # a terminal ends so
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


CTRL_C, CTRL_Z = "\x03", "\x1a"


def test_ctrl_c_in_a_terminal_saves(tmp_path):
    terminal = Terminal(script(tmp_path, SAVES))
    terminal.wait_for("up")
    terminal.type(CTRL_C)
    assert terminal.status() == 130 and (tmp_path / "saved").exists()
    last = ["arlopti_openrlhf: run stopped: it has saved", "arlopti_openrlhf: checkpoint: step 7"]
    assert terminal.text.splitlines()[-2:] == last
    assert "SIGINT: the run saves a checkpoint and ends. A second signal ends it at once." in terminal.text
    assert not lives(tmp_path / "daemon")


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    terminal = Terminal(script(tmp_path, DEAF))
    terminal.wait_for("up")
    terminal.type(CTRL_C)
    terminal.wait_for("A second signal")
    time.sleep(1.2)  # signals within a second are one
    since = time.monotonic()
    terminal.type(CTRL_C)
    assert terminal.status() == 130 and time.monotonic() - since < 5
    assert "SIGINT again: the run ends at once." in terminal.text and "checkpoint: step 7" in terminal.text
    assert not lives(tmp_path / "child") and not lives(tmp_path / "daemon")


def test_ctrl_c_before_there_is_anything_to_save(tmp_path):
    terminal = Terminal(script(tmp_path, "leave_a_process(); print('up', flush=True); time.sleep(100)"))
    terminal.wait_for("up")
    terminal.type(CTRL_C)
    assert terminal.status() == 130 and terminal.text.endswith("arlopti_openrlhf: SIGINT received\r\n")
    assert not lives(tmp_path / "child") and not lives(tmp_path / "daemon")


def test_ctrl_z_halts_the_parent_alone(tmp_path):
    body = """
    begin(child)
    print("up", flush=True)
    time.sleep(1)
    for i in range(5000):  # more than the parent has room for
        child.report(found={"phase": ["update", i]}, has_ray=True, is_training=True)
    child.say_last(0, "what came out")
    (folder / "saved").touch()
    """
    terminal = Terminal(script(tmp_path, body))
    terminal.wait_for("up")
    terminal.type(CTRL_Z)
    assert wait_until((tmp_path / "saved").exists)
    os.kill(terminal.pid, signal.SIGCONT)
    assert terminal.status() == 0 and terminal.text.endswith("what came out\r\n")


def test_a_terminal_that_closes(tmp_path):
    terminal = Terminal(script(tmp_path, SAVES.replace("saves", "lost " * 10_000)))
    terminal.wait_for("up")
    os.close(terminal.descriptor)
    terminal.is_open = False
    assert terminal.status() == 129 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_group_saves(signum, code, tmp_path):
    """`timeout` signals the command, and then its group."""
    with subprocess.Popen(
        script(tmp_path, SAVES), stdout=subprocess.PIPE, start_new_session=True, text=True, preexec_fn=listening
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signum)
        os.killpg(process.pid, signum)
        assert process.wait(60) == code
    assert (tmp_path / "saved").exists() and not lives(tmp_path / "daemon")


def test_under_nohup_sighup_stays_ignored(tmp_path):
    body = "os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGHUP); time.sleep(1); begin(child)"
    done = subprocess.run(["nohup", *script(tmp_path, body)], capture_output=True, timeout=60, preexec_fn=listening)
    assert done.returncode == 0


def test_the_child_dies_with_its_parent(tmp_path):
    with subprocess.Popen(script(tmp_path, DEAF), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.kill()
        assert wait_until(lambda: not lives(tmp_path / "child"), 5)
        os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)  # Ray's processes look after themselves


@pytest.mark.parametrize(
    ("statuses", "code", "resumed"),
    [
        ([1, 137, 4, 0], 0, [False, True, True, True]),
        ([2], 2, [False]),  # refused
        ([1, 2, 0], 0, [False, True, True]),  # the reward server, say, is away at the restart
        ([3], 3, [False]),  # diverged
        ([6], 6, [False]),  # nothing trained
        ([143], 143, [False]),
        ([1, 1, 1, 1, 0], 1, [False, True, True, True]),
    ],
)
def test_a_run_is_started_again_if_that_may_mend_it(statuses, code, resumed, tmp_path):
    body = f"""
    with open(folder / "starts", "a") as file:
        file.write(f"{{again}}\\n")
    begin(child)
    status = {statuses}[len((folder / "starts").read_text().split()) - 1]
    if status == 137:
        os.kill(os.getpid(), signal.SIGKILL)
    child.say_last(status, "its end")
    """
    done = subprocess.run(script(tmp_path, body, restarts=3), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "starts").read_text().split() == list(map(str, resumed))
