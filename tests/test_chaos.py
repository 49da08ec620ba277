"""The fault injection tells a run that survives from one that does not. A script stands for the training here."""

import math
import sys

import pytest

from chaos import run, training
from chaos.faults import CASES, SHORT, Case, interrupted_after, killed, remove_a_file, truncate_a_file
from chaos.run import Outcome, run_case, table
from chaos.training import make_inputs

# Takes a step, grades its prompts and saves every second step, as the training does.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path

folder, variant = Path(sys.argv[1]), sys.argv[2]
actor = folder / "checkpoints" / "_actor"
actor.mkdir(parents=True, exist_ok=True)
stop = []
signal.signal(signal.SIGTERM, signal.SIG_DFL if variant == "dies" else lambda *_: stop.append(True))
if variant == "leaves a process":
    subprocess.Popen(["sleep", "30"], start_new_session=True)

def save(step):
    (actor / f"global_step{step}").mkdir(exist_ok=True)
    (actor / f"global_step{step}" / "model.pt").write_text("whole")

step = 0
for path in sorted(actor.glob("global_step*"), reverse=True):
    if (path / "model.pt").exists() and (path / "model.pt").read_text() == "whole" or variant == "trusts":
        step = int(path.name[11:])
        break
    print(path, "passed over", flush=True)
if variant == "forgets":
    step = 0
while step < 8:
    time.sleep(0.6)  # a fault comes up to 0.33 s after a step
    step += 1
    if not (variant == "skips" and step == 4):
        with open(folder / "prompts.txt", "a") as log:
            log.write("".join(f"{i}\\n" for i in range(8 * step - 8, 8 * step)))
    print(f"Global step {step}: {{", flush=True)
    if step % 2 == 0 or stop:
        save(step)
    if stop:
        print("SIGTERM received", flush=True)
        sys.exit(143)
(folder / "final").mkdir(exist_ok=True)
(folder / "final" / "model.safetensors").touch()
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Return outcome(case, variant): what the harness says of a script that behaves so."""

    def judge(case: Case, variant: str) -> Outcome:
        (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
        arguments = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), variant]
        monkeypatch.setattr(training, "command", lambda *_: arguments)
        monkeypatch.setattr(run, "GRACE_SECONDS", 1)
        return run_case(case, tmp_path, tmp_path / "run", seed=0)

    return judge


SIGTERM = Case("SIGTERM", (interrupted_after(1),))
TORN = Case("torn", (killed("driver", 5),), damage=remove_a_file, passes_over="passed over")


@pytest.mark.parametrize("case", [SIGTERM, TORN], ids=lambda case: case.name)
def test_a_run_that_survives(case, outcome):
    found = outcome(case, "good")
    assert not found.wrong
    assert 0 <= found.noticed < 5 and found.lost == (0 if case is SIGTERM else 3)


@pytest.mark.parametrize(
    "case, variant, wrong",
    [
        (SIGTERM, "dies", "exit status -15, not [143]"),
        (SIGTERM, "leaves a process", "1 processes left: sleep 30"),
        (SIGTERM, "skips", "prompts are missing"),
        (TORN, "forgets", "5 steps lost, at most 4"),
        (
            Case("cut", (killed("driver", 5),), damage=truncate_a_file, passes_over="passed over"),
            "trusts",
            "cut in half",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_run_that_does_not(case, variant, wrong, outcome):
    assert any(wrong in line for line in outcome(case, variant).wrong)


def test_there_are_thirty_cases_with_names_of_their_own():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) == 30 and len(SHORT[0].starts) == 5


def test_the_table_says_what_went_wrong():
    lines = table({"a": Outcome(1.25, 2), "b": Outcome(math.nan, 0, ["no final model"])}).splitlines()
    assert lines[2:] == ["| a | 1.2 s | 2 | yes |", "| b | - | 0 | **no**: no final model |"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_survives_five_faults(tmp_path):
    """The short list of `make chaos`, on the real stack."""
    make_inputs(tmp_path)
    assert not run_case(SHORT[0], tmp_path, tmp_path / "run", seed=0).wrong
