"""The quickstart spares other folders, its flags parse, and its results are shown. CI runs it at a reduced size."""

import json
import subprocess
import sys

import pytest

from arlopti_openrlhf.cli import quickstart, train_ppo_ray
from arlopti_openrlhf.cli.quickstart_results import plot, read_accuracies, report

pytestmark = pytest.mark.whole_stack


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("of the user")
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.quickstart", "--reduced", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"argument --out: {tmp_path} holds something other than" in done.stderr
    assert (tmp_path / "data" / "precious.txt").exists()


@pytest.mark.parametrize("size", [quickstart.FULL, quickstart.REDUCED])
def test_the_real_command_parses_its_flags(tmp_path, size):
    files = quickstart.Files(*(tmp_path / f"{name}.jsonl" for name in quickstart.Files._fields))
    flags = vars(train_ppo_ray.parse(quickstart.training_flags(tmp_path, files, size, seed=3)))
    assert (flags["algo.ar.alpha"], flags["algo.lopti.eta"], flags["train.seed"]) == (0.3, 0.5, 4)
    assert flags["eval.dataset"] == str(files.during) and size.steps % flags["eval.steps"] == 0


def write_responses(path, right: int):
    """Write 2 puzzles of 2 people and 1 of 3, each with `right` of 8 samples right, and a wrong greedy answer."""
    response = {"text": "One\u2028line", "well_formed": True, "tokens": 9, "truncated": False}
    records = [
        {"datasource": source, "temperature": t, "responses": [response | {"score": float(i < r)} for i in range(n)]}
        for source in ("kk_2ppl", "kk_2ppl", "kk_3ppl")
        for t, n, r in ((1.0, 8, right), (0.0, 1, 0))
    ]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def test_results_as_numbers_text_and_picture(tmp_path):
    before = read_accuracies(write_responses(tmp_path / "before.jsonl", right=2))
    after = read_accuracies(write_responses(tmp_path / "after.jsonl", right=4))
    assert {source: found["n"] for source, found in before.items()} == {"all": 3, "kk_2ppl": 2, "kk_3ppl": 1}
    assert before["all"]["accuracy"] == 0.25 and after["all"]["accuracy"] == 0.5 and after["all"]["greedy"] == 0
    assert before["all"]["ci95"] == 0  # every puzzle has the same share of right answers
    summary = {"minutes": 1.0, "peak_rss_gib": 2.0, "before": before, "after": after}
    text = report(summary | {"overall": {"before": before["all"], "after": after["all"]}}, tmp_path, "pass@8")
    assert "Sampled accuracy changed by +0.250" in text and "kk_3ppl         1" in text
    curves = {"train/rollout/reward_mean": {1: -1.0, 2: 1.0}, "train/lopti/low_share": {1: 0.1, 2: 0.1}}
    plot(curves, before, after, tmp_path / "curves.png")  # a short run may have no other curve
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
