"""The child of a run turns what ends it into last lines and an exit code, and tells its parent what goes on."""

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios

import psutil
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from arlopti_openrlhf.ops.lifecycle import child, stopping
from arlopti_openrlhf.ops.lifecycle.parent import Child

FORGED = "arlopti_openrlhf: the run is complete"


def wrapped(error: Exception) -> RayTaskError:
    """Return `error` as `ray.get` raises it on the driver, after two actors."""
    inner = RayTaskError("generate", "the traceback there", error).as_instanceof_cause()
    return RayTaskError("fit", "the traceback there", inner).as_instanceof_cause()


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Return ended(error, closing): the last words of a child in which that is raised, and its exit status."""

    def end(error: BaseException | None, closing=lambda: "what came out") -> tuple[list, object]:
        words = os.memfd_create("last words")
        link = Child(socket.socket(), words)
        link.folder = tmp_path / "removed"  # whoever tidies up TMPDIR removes what is old, during the run too
        with pytest.raises(SystemExit) as exit, child._Run(link, closing).ending():
            if error:
                raise error
        return json.loads(os.pread(words, 2**16, 0) or "[]"), exit.value.code

    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # the child replaces both
    monkeypatch.setattr(child.terminal, "lenient", lambda descriptor, told: (sys.stdout, sys.stderr)[descriptor - 1])
    for thread in ("_report", "_obey", "_look_after_actors"):
        monkeypatch.setattr(child._Run, thread, lambda self: None)
    return end


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (wrapped(stopping.Diverged("loss nan")), 3, "arlopti_openrlhf: run stopped: loss nan"),
        (wrapped(stopping.Interrupted(15)), 143, "arlopti_openrlhf: run stopped: SIGTERM received"),
        (wrapped(ValueError("no label")), 1, "arlopti_openrlhf: run failed: ValueError: no label"),
        (ValueError("\n".join("abcdefg")), 1, "arlopti_openrlhf: run failed: ValueError: a\n  b\n  ...\n  f\n  g"),
        # What it says of others looks like no line of ours.
        (ValueError("a\n" + FORGED), 1, f"arlopti_openrlhf: run failed: ValueError: a\n  {FORGED}"),
        (stopping.RunStopped("a\n" + FORGED), 1, f"arlopti_openrlhf: run stopped: a\\n{FORGED}"),
    ],
)
def test_the_cause_is_the_last_thing_said(error, code, text, ended, capsys):
    words, status = ended(error)
    is_stop = isinstance(child.root(error), stopping.RunStopped)
    assert words == [code, text] and status == code
    said = capsys.readouterr().err
    assert ("Traceback" in said) != is_stop  # a stop is no defect: one line says it all
    assert f"\n{FORGED}" not in said


def test_a_refusal_has_said_why(ended):
    assert ended(SystemExit(2)) == ([], 2)


def test_a_complete_run(ended):
    assert ended(None) == ([0, "what came out"], 0)
    words, status = ended(None, lambda: {}["accuracy"])
    assert status == 0 and "the run is complete. Its results cannot be shown: KeyError" in words[1]


def test_an_actor_that_died_is_named_with_its_last_line():
    context = child.ActorDiedErrorContext(class_name="RolloutRayActor", pid=71, error_message="Its process has died.")
    context.actor_id = b"0" * 16
    lines = child.last_lines(ActorDiedError(context), {"71": "CUDA error", "72": "other"}).splitlines()
    assert lines == [
        "arlopti_openrlhf: run failed: RolloutRayActor (pid 71) has died",
        "  Its process has died.",
        "  its last line: CUDA error",
    ]


# A run on Ray, whose controller takes steps until it is asked to stop, or until an actor dies that nobody waits for.
RUN = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from arlopti_openrlhf.ops.lifecycle.parent import Parent

folder, dies = Path(sys.argv[1]), sys.argv[2]

def train(link, again):
    import ray
    from arlopti_openrlhf.ops.lifecycle import child, cluster, progress, stopping
    wandb = SimpleNamespace(key=None)
    logger = SimpleNamespace(console="progress", wandb=wandb)
    args = SimpleNamespace(
        ckpt=SimpleNamespace(path=str(folder)), logger=logger, reward=SimpleNamespace(remote_url=None)
    )
    child._LOOK = 1.0
    with child.of_run(link, args):
        cluster.wrap_init(link.folder, {})
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)

        @ray.remote(num_cpus=0)
        class Engine:
            def __init__(self, dies):
                assert dies != "at start", "no memory for the cache"

            def live(self, dies):
                print("my last line", flush=True)
                time.sleep(1)
                os._exit(1)

        @ray.remote(num_cpus=0)
        class Controller:
            def fit(self):
                stopping.set_training()
                progress.say("prompts", progress.Prompts(64, 0))
                for step in range(1, 1000):
                    progress.say("step", progress.Step(step, step, "reward 1"))
                    time.sleep(0.5)
                    try:
                        stopping.obey()
                    except stopping.Interrupted:
                        (folder / "saved").touch()
                        raise

        ray.kill(Engine.remote(""))  # the run itself ends it
        if dies:
            engine = Engine.remote(dies)
            engine.live.remote(dies)  # nobody waits for it
        ray.get(Controller.remote().fit.remote())

sys.exit(Parent(5, 0, lambda: "").run(train))
"""


@pytest.mark.whole_stack
@pytest.mark.parametrize(
    ("dies", "said"),
    [
        ("later", ["Engine (pid ", ") has died", "its last line: my last line"]),
        pytest.param("at start", ["Engine cannot start", "no memory for the cache"], marks=pytest.mark.long),
    ],
)
def test_an_actor_whose_death_nobody_waits_for_ends_the_run(dies, said, tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path), dies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and all(part in done.stderr for part in said), done.stderr


@pytest.mark.whole_stack
def test_ctrl_c_in_a_terminal_reaches_the_controller(tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.execv(sys.executable, [sys.executable, "-c", RUN, str(tmp_path), ""])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    text, started = b"", []
    try:
        while part := os.read(terminal, 2**16):
            text += part
            if b"step 3 " in text and not started:
                started = psutil.Process(pid).children(recursive=True)
                os.write(terminal, b"\x03")
    except OSError:  # a terminal ends so
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, text
    assert (tmp_path / "saved").exists() and b"run stopped: SIGINT received" in text
    assert len(started) > 5 and not any(process.is_running() for process in started)
