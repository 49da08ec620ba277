"""Chooses the reward that grades a data source, by the names of the sources: Logic-RL's for K&K, math for others."""

from collections.abc import Sequence
from typing import Any

from arlopti_openrlhf.grading import REWARDS, Reward
from arlopti_openrlhf.grading.reward_answers import Grade, grades


def reward_of(source: str) -> Reward:
    """Return the reward whose `sources` is the longest beginning of the source's name."""
    return max((row for row in REWARDS.values() if source.startswith(row.sources)), key=lambda row: len(row.sources))


def grade(source: str, prompt: str, responses: Sequence[str], label: Any) -> list[Grade]:
    """Grade the responses to one prompt. ValueError for a label that the reward cannot read."""
    queries, n = [prompt + response for response in responses], len(responses)
    return grades(reward_of(source).module.reward_func(queries, [prompt] * n, [label] * n), n)
