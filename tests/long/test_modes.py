"""The modes of OpenRLHF with the token methods on: `make modes` takes all of them, the gate the short ones."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from modes import run
from modes.modes import MODES, Mode

from arlopti_openrlhf.cli import train_ppo_ray

ROOT = Path(__file__).parents[2]
SHORT = [mode for mode in MODES if mode.is_short]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    run.make_inputs(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("mode", SHORT, ids=lambda mode: mode.name)
def test_a_mode_trains(mode, inputs, tmp_path):
    outcome = run.run_mode(mode, inputs, tmp_path / "run")
    assert not outcome.wrong, (tmp_path / "run" / "start1.log").read_text(errors="replace")[-6000:]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_real_parser_takes_its_flags(mode, tmp_path):
    command = run.command(mode, tmp_path, tmp_path / "out", "http://127.0.0.1:1/get_reward", steps=2)
    args = vars(train_ppo_ray.parse(command[3:]))
    assert args["ckpt.output_dir"] == f"{tmp_path}/out/final" and args["vllm.num_engines"] == mode.engines


def test_a_mode_that_does_not_hold_is_named(inputs, tmp_path, monkeypatch):
    scalars = {"train/rollout/reward_mean": {1: 0.0}, "train/a": {1: math.nan}, "train/actor_grad_norm": {1: 0.0}}
    monkeypatch.setattr(run, "read_scalars", lambda folder: scalars)
    monkeypatch.setattr(run, "_run", lambda command, path, folder: path.write_text("log") and 0)
    outcome = run.run_mode(Mode("topic", "name", logs=("a", "b"), says=("words",)), inputs, tmp_path / "run")
    assert outcome.wrong == [
        "start1.log does not say 'words'",
        "step 2 is missing",
        "step 1 logs no b",
        "train/a is NaN",
        "nothing is trained: no gradient",
    ]
    assert "**no**: start1.log does not say 'words'" in run.table({MODES[0].name: outcome})
    monkeypatch.setattr(run, "_run", lambda command, path, folder: 3)
    assert run.run_mode(MODES[0], inputs, tmp_path / "again").wrong == ["start1.log: exit status 3"]


def test_the_page_is_made_of_what_is_recorded():
    """And what is recorded works."""
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert f"\n{run.table(run.recorded())}\n" in page
    assert run.recorded() and len(SHORT) >= 2 and not any(outcome.wrong for outcome in run.recorded().values())


def test_a_result_belongs_to_the_mode_as_it_was(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"before\n{run.START}\nold\n{run.END}\nafter\n")
    run.record({MODES[0].name: run.Outcome(1.0, [])}, results, page)
    run.record({MODES[1].name: run.Outcome(1.0, ["wrong"])}, results, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert f"1 of {len(MODES)} modes work, and {len(MODES) - 2} have not been run" in text and "**no**: wrong" in text
    kept = json.loads(results.read_text())
    kept[MODES[0].name]["mode"] = "of other flags"
    results.write_text(json.dumps(kept))
    assert list(run.recorded(results)) == [MODES[1].name]


def modes(*flags: str) -> subprocess.CompletedProcess:
    command, environment = (
        [sys.executable, "-m", "modes.run", *flags],
        os.environ | {"PYTHONPATH": str(ROOT / "tests/long")},
    )
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_the_list():
    assert modes("--list", "--only", "*LoRA*").stdout.split() == ["DeepSpeed", "LoRA"]
    result = modes("--only", "nothing")
    assert result.returncode == 2 and "matches no mode" in result.stderr
