"""A reward of the package is a file and a row: the commands know one that a test adds so, and that is nowhere else."""

import asyncio
import json
import sys

import pytest

from arlopti_openrlhf import grading
from arlopti_openrlhf.cli import command_line, config_file, serve_rewards, train_ppo_ray
from arlopti_openrlhf.grading import REWARDS, Reward, sources
from arlopti_openrlhf.grading.grader import Grader, Limits
from arlopti_openrlhf.lab.data import published
from arlopti_openrlhf.lab.scoring.inputs import read_rows
from arlopti_openrlhf.ops.preflight import data, reward

TOY = """
def reward_func(queries, prompts, labels, **kwargs):
    if not all(isinstance(label, str) for label in labels):
        raise ValueError("a label is text")
    right = [float(query.endswith(label)) for query, label in zip(queries, labels)]
    return {"rewards": right, "scores": right, "extra_logs": {"well_formed": [1.0] * len(queries)}}
"""
ROWS = [{"prompt": "1 + 1 = ", "label": label, "datasource": "toy_sums"} for label in ("2", 2)]


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_reward.py").write_text(TOY, "utf-8")
    monkeypatch.setattr(grading, "__path__", [*grading.__path__, str(tmp_path)])
    monkeypatch.setitem(REWARDS, "toy", Reward("toy", 1000, sources="toy_"))
    yield
    sys.modules.pop("arlopti_openrlhf.grading.toy_reward", None)


def test_training_takes_it_by_name(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = ["--actor.model_name_or_path", "m", "--reward.remote_url", "toy"]
    assert vars(train_ppo_ray.parse(flags))["reward.remote_url"] == "toy"
    assert config_file.read(config_file.text(command_line.parse(flags)))["reward.remote_url"] == "toy"
    assert REWARDS["toy"].path == str(tmp_path / "toy_reward.py")


def test_its_labels_are_read_before_a_run():
    labels = [(f"row {i}", row["label"]) for i, row in enumerate(ROWS)]
    assert data.unreadable_labels("toy", labels) == [("row 1", "a label is text", True)]


def test_the_package_that_it_needs_is_looked_for(monkeypatch):
    monkeypatch.setitem(REWARDS, "toy", REWARDS["toy"]._replace(package="no-such-package"))
    args = command_line.hierarchize(command_line.parse(["--reward.remote_url", "toy"]))
    args.reward.remote_url = ["toy"]  # as OpenRLHF's own checks leave it
    [found] = reward.check(args)
    assert "no-such-package is not installed" in str(found)


def test_its_data_sources_are_graded_and_read_by_it(tmp_path):
    assert sources.grade("toy_sums", "1 + 1 = ", ["2", "3"], "2") == [(1, 1, True), (0, 0, True)]
    assert [sources.reward_of(name).name for name in ("toy_sums", "kk_2ppl", "aime", "")] == [
        "toy",
        "kk",
        "math",
        "math",
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    with pytest.raises(ValueError, match="line 2: a label is text"):
        read_rows([str(path)])
    assert [read.reason for read in published.read_file(path, "text")] == ["", "unreadable"]


def test_the_server_takes_it():
    [grader] = serve_rewards.make_parser().parse_args(["--grader", "toy"]).grader
    assert grader == ("toy", "toy")
    served = Grader("toy", 1, Limits())
    answer = asyncio.run(served.grade(["1 + 1 = 2"], ["1 + 1 = "], ["2"]))
    served.pool.close()
    assert answer["rewards"] == [1.0]


@pytest.mark.parametrize("name", ["kk", "math"])
def test_the_packages_own_refuse_no_label(name):
    with pytest.raises(ValueError):
        REWARDS[name].label_text(None)
