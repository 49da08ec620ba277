"""A grader has a limit of waiting queries, and a user's file has the memory that it needs."""

import asyncio

import pytest

from arlopti_openrlhf.grading.grader import Grader, Limits, Refused

FILE = """
import time
def reward_func(queries, prompts, labels, **kwargs):
    large = bytearray(5 * 2**29)  # which nobody touches
    time.sleep(1)
    return [float(len(query)) for query in queries]
"""


def test_what_waits_is_answered_in_turn_and_what_would_wait_too_long_is_refused(tmp_path):
    (tmp_path / "reward.py").write_text(FILE)

    async def grade():
        grader = Grader(str(tmp_path / "reward.py"), 1, Limits(queue=3))
        asked = [grader.grade(query, query, query) for query in (["a"], ["bb", "ccc"], ["too much"])]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        left = asyncio.create_task(grader.grade(["d"], ["d"], ["d"]))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert grader.queued == 0
        grader.pool.close()
        return answers

    one, two, refused = asyncio.run(grade())
    assert (one["rewards"], two["rewards"]) == ([1.0], [2.0, 3.0])
    assert isinstance(refused, Refused) and refused.status == 503
