"""The scheduler makes a warm start once, just before the runs that share it."""

import threading
from pathlib import Path

import pytest
from arlopti_testing.study_fakes import of_name, result

from study import scheduler, stored


class WithoutTraining(scheduler.Scheduler):
    """Notes what it would make and train."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        super().__init__(folder / "work", folder / "results.jsonl", parallel=2, timeout=1)
        self.events, self.fails = [], fails

    def _start_cluster(self):
        pass

    def _make_inputs(self, run):
        self.events.append(self._inputs(run).name)
        if self.fails == self._inputs(run).name:
            raise RuntimeError("no memory")

    def _train(self, run):
        self.events.append(run.name)
        return result(run)


@pytest.fixture(autouse=True)
def signals_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(scheduler.signal, "signal", lambda *_: None)


RUNS = [
    of_name(f"{condition}-{name}") for name in ("grpo-0", "ar-0", "grpo-1") for condition in ("decisions", "noise")
]


def test_a_warm_start_is_made_once_and_before_the_runs_that_share_it(tmp_path):
    study = WithoutTraining(tmp_path)
    assert study.run(RUNS) == 0
    assert len(study.events) == 4 + 6 and all(stored.is_done(run, study.results) for run in RUNS)
    for run in RUNS:
        assert study.events.index(f"inputs-{run.condition}-{run.seed}") < study.events.index(run.name)
    # Those of seed 1 come after most runs of seed 0, so a study that is cut short has runs.
    assert study.events.index("inputs-decisions-1") > study.events.index("decisions-grpo-0")


def test_the_warm_starts_of_a_seed_are_made_side_by_side(tmp_path):
    """No run waits for one while another could be made."""
    both = threading.Barrier(2, timeout=20)

    class Meeting(WithoutTraining):
        def _make_inputs(self, run):
            both.wait()

    assert Meeting(tmp_path).run(RUNS) == 0


def test_where_a_warm_start_fails_the_other_runs_go_on(tmp_path, capsys):
    study = WithoutTraining(tmp_path, fails="inputs-noise-1")
    assert study.run(RUNS) == 1
    assert [stored.is_done(run, study.results) for run in RUNS] == [True] * 5 + [False]
    assert "noise-grpo-1: failed: no memory" in capsys.readouterr().out


def test_a_stopped_study_starts_nothing(tmp_path):
    study = WithoutTraining(tmp_path)
    study.stopped = True
    assert study.run(RUNS) == 1
    assert not {run.name for run in RUNS} & set(study.events)
