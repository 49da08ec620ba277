"""Grades responses by a reward of the user's, which is loaded and asked as in a training."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arlopti_openrlhf.grading.reward_answers import Grade, grades

_AT_A_TIME = 32  # as many as a reward process answers
_RETRY_MINUTES = 1.0
_TIMEOUT_SECONDS = 300.0  # as in a training, by default


class OwnReward:
    """A source of rewards.

    Args:
        source: a reward of the package, the path of a Python file, or URLs with commas between them.

    Raises:
        RuntimeError: the file cannot be loaded, or has no `reward_func`.
    """

    def __init__(self, source: str) -> None:
        # This imports vLLM and OpenRLHF, which take long.
        from arlopti_openrlhf.ops.rollouts.reward_client import RewardExecutor

        self.source = source
        self._executor = RewardExecutor(source.split(","), _RETRY_MINUTES, _TIMEOUT_SECONDS)

    @property
    def version(self) -> list[str]:
        """Return the source and, for a file, a digest of it: another file gives other rewards."""
        path = Path(self.source)
        return [self.source, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""]

    def grade(self, samples: Sequence[tuple[str, str, Any]]) -> list[Grade]:
        """Grade samples: query, which is the prompt with the response, prompt and label.

        Raises:
            RewardError: it raised, took too long, or gave no finite number, or no server answered.
        """
        return asyncio.run(self._grade(samples))

    async def _grade(self, samples: Sequence[tuple[str, str, Any]]) -> list[Grade]:
        turn = asyncio.Semaphore(_AT_A_TIME)

        async def one(sample: tuple[str, str, Any]) -> Grade:
            async with turn:
                answer = await self._executor.ask(*sample)
            return grades(answer, 1)[0]

        return list(await asyncio.gather(*map(one, samples)))
