"""Fetches the reward of each sample, and stops the run with the cause where there is none.

Upstream logs that it got no reward, and goes on without. The run then dies later, of something else.
"""

import asyncio
import functools
import math
import random
import time
from typing import Any

import aiohttp
import torch
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.grading.reward_files import REWARD_FILES

logger = init_logger(__name__)

_ATTEMPT = aiohttp.ClientTimeout(total=180)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds between attempts, doubling
_SAY_EVERY = 60.0  # seconds
# The entry of an output that is true where its source returned no scores, so that the reward takes their place.
SCORES_ARE_REWARDS = "scores_are_rewards"


class RewardError(Exception):
    """Says that a sample has no usable reward, and that nothing is left to try."""


def install(retry_minutes: float) -> None:
    """Make OpenRLHF's vLLM engines fetch rewards with `RewardExecutor`. Call it on the driver, before Ray starts.

    Ray pickles `RolloutRayActor` by value, with its module's globals as they are on the driver.

    Args:
        retry_minutes: how long each sample waits for a reward server.
    """
    vllm_engine.SingleTurnAgentExecutor = functools.partial(RewardExecutor, retry_minutes=retry_minutes)


class RewardExecutor(SingleTurnAgentExecutor):
    """`SingleTurnAgentExecutor` with three changes.

    1. `kk` and `math` stand for the package's reward files.
    2. It waits for a server that does not answer.
    3. A reward function that raises, or a reward that is no finite number, ends the run with its cause.

    Args:
        remote_rm_url: `kk`, `math`, the path of a Python file, or URLs that take turns.
        retry_minutes: how long each sample waits for a server.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None, retry_minutes: float = 10.0) -> None:
        sources = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url or []
        # The engine looks the files up, and not the driver, because their nodes may have the package in two folders.
        super().__init__([REWARD_FILES.get(source, source) for source in sources])
        self.retry_seconds = 60 * retry_minutes
        # Without endpoints, upstream's `execute` generates and leaves the reward to ours.
        self.sources: list[str] = self.reward_endpoints
        self.reward_endpoints: list[str] = []
        self._waiting = 0  # samples that wait for a server
        self._down_since = self._said = 0.0

    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        """Return upstream's result, with its `reward`, `scores` and `extra_logs` as numbers.

        Raises:
            RewardError: the function raised, no server answered in time, one refused the request, or the answer has no
                finite reward.
        """
        output = await super().execute(
            prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=images
        )
        if not self.sources:
            return output
        query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
        if self.reward_func:
            result = await self._call_function(query, prompt, label)
        else:
            result = await self._ask_server({"query": [query], "prompts": [prompt], "labels": [label]})
        try:
            if not isinstance(result, dict) or result.get("rewards") is None:
                raise ValueError(f"no dict with `rewards`, but {str(result)[:200]}")
            reward = _number("rewards", result["rewards"])
            scores = result.get("scores")
            output["reward"] = reward
            output["scores"] = reward if scores is None else _number("scores", scores)
            output[SCORES_ARE_REWARDS] = scores is None
            output["extra_logs"] = {
                name: _number(name, value, finite=False) for name, value in (result.get("extra_logs") or {}).items()
            }
        except ValueError as error:
            raise RewardError(f"{self.sources[0]} returned {error}{_about(query, label)}") from None
        return output

    async def _call_function(self, query: str, prompt: str, label: Any) -> Any:
        try:
            return await asyncio.to_thread(self.reward_func, [query], [prompt], [label])
        except Exception as error:
            raise RewardError(
                f"{self.sources[0]}: reward_func raised {type(error).__name__}: {error}{_about(query, label)}"
            ) from error

    async def _ask_server(self, message: dict) -> Any:
        """Return a server's answer, after as many attempts as the time allows. Each attempt asks the next server.

        Raises:
            RewardError: the time is up, or the server refuses the request itself (4xx).
        """
        start, pause, failed = time.monotonic(), _FIRST_PAUSE, False
        try:
            while True:
                url = next(self._reward_endpoint_cycle)
                try:
                    answer = await _post(url, message)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                    cause = f"{type(error).__name__}: {error}"
                else:
                    if failed and self._down_since:
                        logger.info(f"reward server: answers again, after {time.monotonic() - self._down_since:.0f} s")
                        self._down_since = 0.0
                    return answer
                if not failed:
                    failed = True
                    self._waiting += 1
                waited = time.monotonic() - start
                self._say(url, cause)
                if waited + pause > self.retry_seconds:
                    raise RewardError(
                        f"no reward from {url} in {waited / 60:.1f} minutes (--reward.retry_minutes): {cause}"
                    )
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._waiting -= failed

    def _say(self, url: str, cause: str) -> None:
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._said >= _SAY_EVERY:
            self._said = now
            logger.warning(
                f"reward server: {self._waiting} samples wait for {url}, for {now - self._down_since:.0f} s so far, "
                f"for up to {self.retry_seconds / 60:g} minutes: {cause}"
            )


async def _post(url: str, message: dict) -> Any:
    # Each request opens its own connection, as upstream's do. A kept one could have died with its server since.
    async with aiohttp.ClientSession(timeout=_ATTEMPT) as session, session.post(url, json=message) as response:
        if 400 <= response.status < 500 and response.status not in (408, 429):
            text = (await response.text())[:500]
            about = _about(message["query"][0], message["labels"][0])
            raise RewardError(f"{url} refuses the request with status {response.status}: {text}{about}")
        if response.status >= 400:
            raise OSError(f"status {response.status}: {(await response.text())[:500]}")
        return await response.json(content_type=None)


def _number(name: str, value: Any, finite: bool = True) -> float:
    """Return the number in `value`, which is a number, or a list or tensor of one. ValueError for anything else."""
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        value = value.tolist()
    given = value
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise ValueError(f"{name} for one sample that are not one number: {str(given)[:200]}")
    if finite and not math.isfinite(value):
        raise ValueError(f"{name} that are not finite: {value}")
    return float(value)


def _about(query: str, label: Any) -> str:
    return f"\nlabel: {str(label)[:2000]}\nquery: {query}"
