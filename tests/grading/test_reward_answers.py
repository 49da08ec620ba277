"""An answer of a reward source is understood in every form that users write, or refused with what it is."""

import numpy as np
import pytest
import torch

from arlopti_openrlhf.grading.reward_answers import normalise


@pytest.mark.parametrize(
    "answer",
    [
        {"rewards": 2, "scores": 1, "extra_logs": {"x": True}},
        {"rewards": [2.0], "scores": [1.0], "extra_logs": {"x": [1.0]}},
        {"rewards": [[2]], "scores": torch.ones(1, 1), "extra_logs": {"x": np.float32(1)}},
        {"rewards": torch.tensor(2.0), "scores": [torch.tensor(1)], "extra_logs": {"x": torch.ones(1)}},
    ],
)
def test_one_sample(answer):
    assert normalise(answer, 1) == {"rewards": [2.0], "scores": [1.0], "extra_logs": {"x": [1.0]}}


@pytest.mark.parametrize(
    "rewards",
    [[0, 0.5], (0, 0.5), [[0], [0.5]], torch.tensor([0, 0.5]), torch.tensor([[0], [0.5]]), np.array([0, 0.5]),
     [torch.tensor(0), torch.tensor([0.5])]],
)  # fmt: skip
@pytest.mark.parametrize("as_dict", [True, False])
def test_several_samples_bare_or_in_a_dict(rewards, as_dict):
    answer = {"rewards": rewards} if as_dict else rewards
    assert normalise(answer, 2) == {"rewards": [0.0, 0.5], "scores": None, "extra_logs": {}}


@pytest.mark.parametrize("answer", [0.5, [0.5], torch.tensor([0.5]), torch.tensor(0.5)])
def test_the_reward_of_one_sample_alone(answer):
    assert normalise(answer, 1)["rewards"] == [0.5]


def test_extra_logs_may_be_undefined():
    assert str(normalise({"rewards": 1, "extra_logs": {"x": float("nan")}}, 1)["extra_logs"]) == "{'x': [nan]}"


@pytest.mark.parametrize(
    "answer, n, problem",
    [
        (None, 1, "no dict with `rewards`.*None"),
        ({"scores": 1.0}, 1, "no dict with `rewards`.*scores"),
        ({"reward": 1.0}, 1, "no dict with `rewards`"),
        ("3", 1, "rewards for one sample that are not one number: 3"),
        ({"rewards": []}, 1, "rewards for one sample that are not one number"),
        ({"rewards": [1.0, 2.0]}, 1, r"not one number: \[1.0, 2.0\]"),
        ([1.0, None], 2, r"rewards for 2 samples that are not 2 numbers: \[1.0, None\]"),
        ([1.0], 2, "not 2 numbers"),
        (1.0, 2, "not 2 numbers"),
        ([[1.0, 2.0], [3.0, 4.0]], 2, "not 2 numbers"),
        (float("nan"), 1, "rewards that are not finite: nan"),
        (10**400, 1, "rewards that are not finite"),
        ({"rewards": 1, "scores": [float("inf")]}, 1, "scores that are not finite: inf"),
        ({"rewards": 1, "extra_logs": {"x": [1, 2]}}, 1, "x for one sample"),
        ({"rewards": 1, "extra_logs": [1]}, 1, "extra_logs that are no dict"),
    ],
)
def test_anything_else_is_refused(answer, n, problem):
    with pytest.raises(ValueError, match=problem):
        normalise(answer, n)
