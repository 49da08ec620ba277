"""Which rule grades the responses to a data source: K&K's sources by Logic-RL's, others as math."""

from typing import NamedTuple

from arlopti_openrlhf.grading import kk_reward, math_reward


class SourceGrade(NamedTuple):
    """What one response earned.

    reward: what advantages come from: 3, -0.5, -1 or -3 for K&K; 1 or 0 for math.
    score: 1.0 where the answer is right, else 0.0.
    well_formed: in the form that the prompt asks for: K&K's tags, a boxed answer.
    """

    reward: float
    score: float
    well_formed: bool


def grade(source: str, response: str, label: str) -> SourceGrade:
    """Grades one whole assistant turn. ValueError for a label that its grader cannot read."""
    if source.startswith("kk_"):
        result = kk_reward.grade(response, label)
        return SourceGrade(result.reward, result.score, result.well_formed)
    result = math_reward.grade(response, label)
    return SourceGrade(result.score, result.score, result.boxed)
