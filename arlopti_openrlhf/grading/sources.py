"""Chooses the rule that grades a data source: Logic-RL's for the K&K sources, math for all others."""

from typing import NamedTuple

from arlopti_openrlhf.grading import kk_reward, math_reward


class SourceGrade(NamedTuple):
    """What one response earned.

    reward: what the advantages come from, which is 3, -0.5, -1 or -3 for K&K and 1 or 0 for math.
    score: 1.0 where the answer is right, else 0.0.
    well_formed: the response has the form that the prompt asks for, K&K's tags or a boxed answer.
    """

    reward: float
    score: float
    well_formed: bool


def grade(source: str, response: str, label: str) -> SourceGrade:
    """Grade one whole assistant turn. ValueError for a label that its grader cannot read."""
    if source.startswith("kk_"):
        puzzle = kk_reward.grade(response, label)
        return SourceGrade(puzzle.reward, puzzle.score, puzzle.well_formed)
    answer = math_reward.grade(response, label)
    return SourceGrade(answer.score, answer.score, answer.boxed)
