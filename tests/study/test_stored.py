"""A run is done where its result is there, with its own configuration, on any machine."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from arlopti_testing.study_fakes import of_name, result

from study import runs, stored

ROOT = Path(__file__).parents[2]


def test_every_run_of_the_study_is_done():
    """A change of the configuration that nobody meant would throw away hours of training."""
    assert all(stored.is_done(run, stored.RESULTS) for run in [*runs.STUDY, *runs.TUNING])


def test_a_run_is_done_with_its_own_configuration_only(tmp_path):
    wanted = of_name("both-1")
    assert not stored.is_done(wanted, tmp_path)
    stored.write(result(wanted), tmp_path)
    assert stored.is_done(wanted, tmp_path)
    assert not stored.is_done(wanted._replace(learning_rate=1.0), tmp_path)
    assert not stored.is_done(of_name("both-2"), tmp_path)
    assert stored.load(runs.STUDY, tmp_path) == {"both-1": result(wanted)}
    assert len((tmp_path / "both-1.json").read_text()) < 6000


def test_runs_that_would_make_no_pair_are_refused(tmp_path):
    """The warm start of a seed and condition is the same for all its runs, which another kind of CPU may not make."""
    wanted = of_name("noise-ar-1")
    stored.refuse_another_warm_start(wanted, "b", tmp_path)
    for name in ("noise-grpo-0", "decisions-grpo-1", "noise-grpo-1", "grpo-1"):
        stored.write(result(of_name(name)), tmp_path)
    stored.refuse_another_warm_start(wanted, "a", tmp_path)
    with pytest.raises(RuntimeError, match="its warm start is not noise-grpo-1's"):
        stored.refuse_another_warm_start(wanted, "b", tmp_path)
    stored.refuse_another_warm_start(of_name("noise-ar-2"), "b", tmp_path)
    (tmp_path / "decisions-grpo-1.json").unlink()
    stored.refuse_another_warm_start(of_name("decisions-ar-1"), "b", tmp_path)  # no pair with the first study's


def test_results_are_files_of_a_folder_or_lines_of_a_file(tmp_path):
    wanted, other = of_name("noise-lopti-1"), of_name("noise-grpo-1")
    lines = tmp_path / "some.jsonl"
    for of in (wanted, other, wanted):
        stored.write(result(of), lines)
    stored.write(result(other), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["noise-grpo-1.json", "some.jsonl"]
    assert stored.load(runs.FAMILY, lines) == {of.name: result(of) for of in (wanted, other)}
    assert stored.load(runs.FAMILY, tmp_path) == {other.name: result(other)}
    with pytest.raises(RuntimeError, match="its warm start is not noise-lopti-1's"):
        stored.refuse_another_warm_start(wanted, "b", lines)


def test_results_on_an_earlier_split_are_read_and_none_is_added_to_them(tmp_path):
    """The same run is now trained and tested on other puzzles than they were."""
    earlier = result(of_name("grpo-0"))
    del earlier["configuration"]["inputs"]["held_out_by"]
    stored.write(result(of_name("grpo-1")), tmp_path)
    stored.refuse_another_split(tmp_path)
    stored.write(earlier, tmp_path)
    assert stored.is_done(of_name("grpo-0"), tmp_path)
    command = [sys.executable, "-m", "study.run", "--only", "*-2", "--results", tmp_path, "--work", tmp_path / "work"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 2 and "on an earlier split of the puzzles, such as grpo-0's" in output.stderr
    assert not (tmp_path / "work").exists()


def test_the_configuration_is_that_of_any_machine():
    text = json.dumps(runs.configuration(of_name("ar-0")))
    assert str(ROOT) not in text and "rewards/kk_reward.py" in text and "INPUTS/model" in text


def test_dry_run_lists_and_starts_nothing():
    command = [sys.executable, "-m", "study.run", *shlex.split("--dry-run --only 'only-*'")]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    listed = [line.split()[1] for line in output.stdout.splitlines()[1:]]
    assert listed == [f"only-{group}-{seed}" for seed in range(3) for group in ("low", "high")]
    family = subprocess.run([*command[:-1], "*-stapo-1", "--family"], capture_output=True, text=True, cwd=ROOT)
    assert [line.split()[1] for line in family.stdout.splitlines()[1:]] == ["decisions-stapo-1", "noise-stapo-1"]
