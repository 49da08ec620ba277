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
        grader = Grader("own", str(file), 1, Limits())
        waiting = [asyncio.create_task(grader.grade(query, query, query)) for query in (["a"], ["bb", "ccc"])]
        await asyncio.sleep(0)  # until both wait
        work = asyncio.create_task(grader.work())
        answers = await asyncio.gather(*waiting)
        work.cancel()
        grader.pool.close()
        return answers

    one, two = asyncio.run(grade())
    # Without scores there is no accuracy: a reward is none.
    assert one == {"rewards": [1.0], "scores": [0.5] if scored else None, "extra_logs": {"together": [3.0]}}
    scores = [1.0, 1.5] if scored else None
    assert two == {"rewards": [2.0, 3.0], "scores": scores, "extra_logs": {"together": [3.0, 3.0]}}
