"""The child of a run turns what ends it into last lines and an exit code, and tells its parent what goes on."""

import json
import os
import socket
import subprocess
import sys

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
    assert words[:2] == [code, text] and status == code
    said = capsys.readouterr().err
    assert ("Traceback" in said) != is_stop  # a stop is no defect: one line says it all
    assert f"\n{FORGED}" not in said


def test_a_refusal_has_said_why(ended):
    assert ended(SystemExit(2)) == ([], 2)


def test_a_complete_run(ended):
    assert ended(None) == ([0, "what came out", True], 0)
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


WAITS = """
import os, socket, sys, time
from pathlib import Path
import ray
from arlopti_openrlhf.ops.lifecycle import child
from arlopti_openrlhf.ops.lifecycle.parent import Child
child._LOOK = 1.0
words = int(sys.argv[1])
link = Child(socket.socket(), words)
link.folder = Path("/nonexistent")
link.wait_for_request = lambda: time.sleep(1000)
with child._Run(link, str).ending():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)

    @ray.remote(num_cpus=0)
    class Engine:
        def __init__(self, dies):
            assert dies != "at start", "no memory for the cache"

        def live(self, dies):
            print("my last line", flush=True)
            time.sleep(1)
            os._exit(1)

    ended = Engine.remote("")  # the run itself ends it
    ray.kill(ended)
    engine = Engine.remote(sys.argv[2])
    engine.live.remote(sys.argv[2])  # nobody waits for it
    time.sleep(300)
"""


@pytest.mark.whole_stack
@pytest.mark.parametrize(
    ("dies", "said"),
    [
        ("later", ["Engine (pid ", ") has died", "its last line: my last line"]),
        ("at start", ["Engine cannot start", "no memory for the cache"]),
    ],
)
def test_an_actor_whose_death_nobody_waits_for_ends_the_run(dies, said):
    words = os.memfd_create("last words")
    command = [sys.executable, "-c", WAITS, str(words), dies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, pass_fds=[words])
    code, text, is_stop = json.loads(os.pread(words, 2**16, 0))
    assert done.returncode == code == 1 and not is_stop
    assert all(part in text for part in said), text
