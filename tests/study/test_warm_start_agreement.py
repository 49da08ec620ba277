"""Each warm start is asked once, on its own training puzzles."""

import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.lab.analysis import rollouts
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows
from study import runs, stored, validation, warm_start_agreement


def graded(rows, sampled) -> list[rollouts.Graded]:
    """Reward by the first token, because random weights answer no puzzle."""
    return [
        rollouts.Graded(i, text, one.prompt_ids, ids, float(ids[0] % 3), 0.0)
        for i, one in enumerate(sampled)
        for text, ids in one.responses
    ]


@pytest.fixture
def make_inputs(make_model, tmp_path, monkeypatch):
    """Return make_inputs(name, count), which makes a warm start in the folder that the command looks into."""
    arguments = ["warm_start_agreement", "--work", str(tmp_path), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", arguments)

    def make(name: str, count: int) -> Path:
        inputs = tmp_path / name
        inputs.mkdir()
        Path(make_model()).rename(inputs / "model")
        write_rows(generate_rows(runs.PEOPLE, count, held_out=False, seed=0), inputs / "train.jsonl")
        (inputs / "configuration.json").write_text("{}")
        return inputs

    return make


def test_warm_starts_that_are_there_are_asked_and_stored(make_inputs, tmp_path, monkeypatch):
    inputs = make_inputs("inputs-decisions-0", 8)
    (tmp_path / "inputs-noise-0").mkdir()  # still being made
    monkeypatch.setattr(warm_start_agreement, "PROMPTS", 12)
    monkeypatch.setattr(warm_start_agreement.rollouts, "grade", graded)
    monkeypatch.setitem(runs.CONDITIONS, runs.DECISIONS, runs.CONDITIONS[runs.DECISIONS]._replace(max_new_tokens=6))
    warm_start_agreement.main()
    path = tmp_path / "results" / stored.AGREEMENT
    assert not stored.load_agreements(runs.NOISE, "entropy", path)
    for by in ("probability", "entropy"):
        found = stored.load_agreements(runs.DECISIONS, by, path)
        assert list(found) == [0]
        assert found[0]["by"] == by and found[0]["prompts"] == 12 and -1 <= found[0]["whole"]["cosine"] <= 1
        assert sum(cell.get("share", 0) for cell in found[0]["cells"]) == pytest.approx(1, abs=1e-2)
        assert found[0]["warm_start_sha256"] == stored.sha256(inputs / "model" / "model.safetensors")
    assert len(validation.files({}, path)["agreement_cells.csv"]) == 1 + 2 * len(found[0]["cells"])
    # A second time, nothing is asked again.
    before = path.read_text()
    warm_start_agreement.main()
    assert path.read_text() == before


def test_puzzles_without_different_rewards_are_refused(make_inputs):
    make_inputs("inputs-noise-3", 2)
    with pytest.raises(RuntimeError, match="too few puzzles"):
        warm_start_agreement.main()
