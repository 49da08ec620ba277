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
    for planned, file in (
        ((*runs.STUDY, *runs.TUNING), stored.AR_LOPTI),
        (runs.FAMILY, stored.FAMILY),
        (runs.NEXT, stored.NEXT),
    ):
        assert stored.load(planned, stored.RESULTS / file).keys() == {run.name for run in planned}


def test_a_run_is_done_with_its_own_configuration_only(tmp_path):
    path, wanted = tmp_path / "some.jsonl", of_name("both-1")
    assert not stored.is_done(wanted, path)
    stored.write(result(wanted), path)
    assert stored.is_done(wanted, path)
    assert not stored.is_done(wanted._replace(learning_rate=1.0), path)
    assert not stored.is_done(of_name("both-2"), path)
    assert stored.load(runs.STUDY, path) == {"both-1": result(wanted)}
    assert len(path.read_text()) < 6000


def test_runs_that_would_make_no_pair_are_refused(tmp_path):
    """The warm start of a seed and condition is the same for all its runs, which another kind of CPU may not make."""
    path, wanted = tmp_path / "some.jsonl", of_name("noise-ar-1")
    stored.refuse_another_warm_start(wanted, "b", path)
    for name in ("noise-grpo-0", "grpo-1", "noise-grpo-1"):
        stored.write(result(of_name(name)), path)
    stored.refuse_another_warm_start(of_name("decisions-ar-1"), "b", path)  # no pair with the first study's
    stored.write(result(of_name("decisions-grpo-1")), path)
    stored.refuse_another_warm_start(wanted, "a", path)
    with pytest.raises(RuntimeError, match="its warm start is not noise-grpo-1's"):
        stored.refuse_another_warm_start(wanted, "b", path)
    stored.refuse_another_warm_start(of_name("noise-ar-2"), "b", path)


def test_each_result_is_a_line_of_its_study_s_file(tmp_path):
    wanted, other = of_name("noise-lopti-1"), of_name("noise-grpo-1")
    path = tmp_path / "results" / "some.jsonl"
    for of in (wanted, other, wanted):
        stored.write(result(of), path)
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [
        *map(result, (wanted, other, wanted))
    ]
    assert stored.load(runs.FAMILY, path) == {of.name: result(of) for of in (wanted, other)}


def test_results_on_an_earlier_split_are_read_and_none_is_added_to_them(tmp_path):
    """The same run is now trained and tested on other puzzles than they were."""
    path, earlier = tmp_path / "some.jsonl", result(of_name("grpo-0"))
    del earlier["configuration"]["inputs"]["held_out_by"]
    stored.write(result(of_name("grpo-1")), path)
    stored.refuse_another_split(path)
    stored.write(earlier, path)
    assert stored.is_done(of_name("grpo-0"), path)
    command = [sys.executable, "-m", "study.run", "--only", "*-2", "--results", path, "--work", tmp_path / "work"]
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
