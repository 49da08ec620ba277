"""Small requests share a call of the reward function, and each gets its own part of the answer."""

import asyncio

import pytest

from arlopti_openrlhf.grading.grader import Grader, Limits

ANSWER = """
def reward_func(queries, prompts, labels, **kwargs):
    rewards = [float(len(query)) for query in queries]
    answer = {"rewards": rewards, "extra_logs": {"together": [float(len(queries))] * len(queries)}}
    return answer | ({"scores": [0.5 * reward for reward in rewards]} if SCORED else {})
"""


@pytest.mark.parametrize("scored", [False, True])
def test_requests_that_share_a_call_get_their_parts(scored, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(f"SCORED = {scored}\n{ANSWER}", "utf-8")

    async def grade():
        grader = Grader(str(file), 1, Limits())
        answers = await asyncio.gather(*(grader.grade(q, q, q) for q in (["first"], ["a"], ["bb", "ccc"])))
        grader.pool.close()
        return answers

    first, one, two = asyncio.run(grade())
    # Without scores there is no accuracy: a reward is none.
    scores = [0.5, 1.0, 1.5] if scored else None
    assert first["extra_logs"] == {"together": [1.0]}  # its worker was free
    assert one == {"rewards": [1.0], "scores": scores and scores[:1], "extra_logs": {"together": [3.0]}}
    assert two == {"rewards": [2.0, 3.0], "scores": scores and scores[1:], "extra_logs": {"together": [3.0, 3.0]}}
