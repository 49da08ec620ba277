"""A grader has a limit of waiting queries, and a user's file has the memory that it needs."""

import asyncio

from arlopti_openrlhf.grading.grader import Grader, Limits, Refused

FILE = """
import time
from pathlib import Path
def reward_func(queries, prompts, labels, **kwargs):
    large = bytearray(5 * 2**29)  # which nobody touches
    with open(FOLDER + "/asked", "a") as file:
        print(*queries, file=file)
    time.sleep(0.5)
    return [float(len(query)) for query in queries]
"""


def test_what_waits_is_answered_in_turn_and_what_exceeds_the_queue_is_refused(tmp_path):
    (tmp_path / "reward.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{FILE}")

    async def grade():
        grader = Grader(str(tmp_path / "reward.py"), 1, Limits(queue=4))
        asked = [["a"], ["bb", "ccc"], ["too", "much"], ["late"]]
        first, second, refused, late = (asyncio.create_task(grader.grade(query, query, query)) for query in asked)
        await asyncio.sleep(0)
        late.cancel()
        answers = await asyncio.gather(first, second, refused, late, return_exceptions=True)
        assert grader.queued == 0
        grader.pool.close()
        return answers

    one, two, refused, cancelled = asyncio.run(grade())
    assert (one["rewards"], two["rewards"]) == ([1.0], [2.0, 3.0])
    assert isinstance(refused, Refused) and refused.status == 503
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (tmp_path / "asked").read_text() == "a\nbb ccc\n"  # what was cancelled before its turn is not asked
