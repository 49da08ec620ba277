"""The fault injection tells a run that survives from one that does not. A script stands for the training here."""

import math
import sys

import pytest
import torch
from chaos import cases, nemesis, training
from chaos.cases import Outcome, run_case
from chaos.faults import Case, name_of, row
from chaos.run import table

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
    (actor / f"global_step{step}" / "optim_states.pt").write_text("moments")

def whole(path):
    files = {"model.pt": "whole", "optim_states.pt": "moments"}
    return all((path / name).exists() and (path / name).read_text() == text for name, text in files.items())

step = 0
for path in sorted(actor.glob("global_step*"), reverse=True):
    if whole(path) or variant == "trusts":
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
starts = len(list(folder.glob("start*.log")))
(folder / "final" / "model.safetensors").write_text(str(starts) if variant == "drifts" else "weights")
if variant == "writes into the other run" and starts > 1:
    (next(folder.parent.glob("unbroken-*/run")) / "prompts.txt").write_text("")
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Return outcome(case, variant): what the harness says of a script that behaves so."""

    def judge(case: Case, variant: str) -> Outcome:
        (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
        arguments = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), variant]
        monkeypatch.setattr(training, "command", lambda *_: arguments)
        monkeypatch.setattr(cases, "GRACE_SECONDS", 1)
        return run_case(case, tmp_path, tmp_path / "run", seed=0)

    return judge


SIGTERM = (row("SIGTERM", step=1),)
TORN = (row("newest checkpoint torn"),)
CUT = (row("a checkpoint's file cut in half"),)


@pytest.mark.long
@pytest.mark.parametrize("case", [SIGTERM, TORN, CUT], ids=name_of)
def test_a_run_that_survives(case, outcome):
    found = outcome(case, "good")
    assert not found.wrong
    assert 0 <= found.noticed < 5 and found.lost == (0 if case is SIGTERM else 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "case, variant, wrong",
    [
        (SIGTERM, "dies", "exit status -15, not [143]"),
        (SIGTERM, "leaves a process", "1 processes left: sleep 30"),
        (SIGTERM, "skips", "prompts are missing"),
        (TORN, "forgets", "5 steps lost, at most 4"),
        (CUT, "trusts", "cut in half"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_run_that_does_not(case, variant, wrong, outcome):
    assert any(wrong in line for line in outcome(case, variant).wrong)


def test_the_nemesis_draws_eight_faults_that_keep_the_updates():
    drawn = [nemesis.draw(seed) for seed in range(10)]
    assert all(len({fault.name for fault in case}) == 8 and all(f.keeps_updates for f in case) for case in drawn)
    assert all([fault.step for fault in case] == sorted({fault.step for fault in case}) for case in drawn)
    assert len({name_of(case) for case in drawn}) == 10 and nemesis.draw(3) == nemesis.draw(3)


def test_equal_tensors(tmp_path):
    """Tensors must be equal to the last bit, wherever they lie in what was saved."""
    states = [{"state": [{"step": torch.tensor(3.0), "moment": torch.tensor([0.1, 0.2])}], "name": n} for n in "abc"]
    states[2]["state"][0]["moment"] = torch.tensor([0.1, 0.2]).nextafter(torch.tensor(1.0))
    for i, state in enumerate(states):
        run = tmp_path / str(i)
        (run / "final").mkdir(parents=True)
        (run / "final" / "model.safetensors").touch()
        last = run / "checkpoints" / "_actor" / f"global_step{nemesis.STEPS}"
        last.mkdir(parents=True)
        torch.save(state, last / "optim_states.pt")
    found = [nemesis.differences(tmp_path / "0", tmp_path / other) for other in "12"]
    assert found == [[], ["optim_states.pt differs"]]


def test_the_table_says_what_went_wrong():
    lines = table({"a": Outcome(1.25, 2), "b": Outcome(math.nan, 0, ["no final model"])}).splitlines()
    assert lines[2:] == ["| a | 1.2 s | 2 | yes |", "| b | - | 0 | **no**: no final model |"]
