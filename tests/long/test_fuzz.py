"""The fuzz command's past failures stay fixed, and the command finds, keeps and repeats a new one."""

import json
import random

import pytest
from fuzz import run
from fuzz.mutations import mutated
from fuzz.targets import SERVER, TARGETS, Broken, Target


@pytest.fixture(scope="module", autouse=True)
def end_of_the_server():
    yield
    SERVER.close()


@pytest.mark.parametrize("path", sorted(run.CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_a_past_failure_is_fixed(path):
    kept = json.loads(path.read_text("utf-8"))
    assert run.failure(kept["target"], kept["input"]) is None


@pytest.mark.parametrize("name", TARGETS)
def test_what_nothing_was_changed_in_breaks_nothing(name):
    for seed in TARGETS[name].seeds:
        assert run.failure(name, seed) is None


def test_a_failure_is_printed_kept_and_found_again(tmp_path, monkeypatch, capsys):
    def check(case):
        if "<answer>" in str(case):
            raise Broken("it has an answer")

    monkeypatch.setitem(TARGETS, "broken", Target(check, [{"text": "abc"}]))
    flags = ["--seconds", "2", "--target", "broken", "--corpus", str(tmp_path)]
    assert run.main(flags) == 1
    [path] = tmp_path.glob("*.json")
    printed = capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert "seed 0" in printed and path.name in printed and json.dumps(kept["input"])[:100] in printed
    assert run.failure("broken", kept["input"]).strip().endswith("Broken: it has an answer")
    # The same seed finds the same input.
    path.unlink()
    run.main(flags)
    assert path.exists()


def test_a_hang_is_a_failure(monkeypatch):
    monkeypatch.setattr(run, "HANGS_AFTER", 1)
    monkeypatch.setitem(TARGETS, "hangs", Target(lambda case: [None for _ in iter(int, 1)], [{}]))
    assert "TimeoutError" in run.failure("hangs", {})


def test_changes_come_from_the_seed_alone():
    seeds = TARGETS["math"].seeds
    first, second = (
        [repr(mutated(rng, seeds[0], seeds)) for _ in range(50)] for rng in (random.Random(7), random.Random(7))
    )
    assert first == second and len(set(first)) > 40
