"""Fetches the reward of each sample, and stops the run with the cause where there is none.

Upstream logs that it got no reward and continues without it. The run then dies later, of something else.
"""

import asyncio
import functools
import itertools
import random
import time
from copy import copy
from typing import Any

import aiohttp
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.grading.worker_pool import Died, TimedOut
from arlopti_openrlhf.ops.lifecycle import awake, credentials
from arlopti_openrlhf.ops.rollouts.reward_process import Raised, RewardProcess
from arlopti_openrlhf.ops.rollouts.rollout_log_probs import SpotChecks, fill

logger = init_logger(__name__)

_ATTEMPT = aiohttp.ClientTimeout(total=180)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds between attempts, doubling
_SAY_EVERY = 60.0  # seconds
# The entry of an output that is true if its source returned no scores: the reward then takes their place.
SCORES_ARE_REWARDS = "scores_are_rewards"


class RewardError(Exception):
    """A sample has no usable reward, and nothing is left to try."""


def install(retry_minutes: float, timeout_seconds: float) -> None:
    """Make OpenRLHF's vLLM engines fetch rewards with `RewardExecutor`. Call it on the driver, before Ray starts.

    Ray pickles `RolloutRayActor` by value, with its module's globals as they are on the driver.

    Args:
        retry_minutes: how long each sample waits for a reward server.
        timeout_seconds: how long a call of a reward function may take.
    """
    vllm_engine.SingleTurnAgentExecutor = functools.partial(
        RewardExecutor, retry_minutes=retry_minutes, timeout_seconds=timeout_seconds
    )


class RewardExecutor(SingleTurnAgentExecutor):
    """`SingleTurnAgentExecutor` with five changes.

    1. `kk` and `math` stand for the package's reward files.
    2. It waits for a server that does not answer.
    3. A reward function runs in a process of its own, and each call has a time limit.
    4. A reward function that raises, or a reward that is no finite number, ends the run with its cause.
    5. vLLM returns tokens and no text.

    Args:
        remote_rm_url: `kk`, `math`, the path of a Python file, or URLs that take turns.
        retry_minutes: how long each sample waits for a server.
        timeout_seconds: how long a call of a reward function may take.

    Raises:
        RuntimeError: the file cannot be loaded, or has no `reward_func`.
    """

    def __init__(
        self,
        remote_rm_url: str | list[str] | None = None,
        retry_minutes: float = 10.0,
        timeout_seconds: float = 300.0,
    ) -> None:
        # Without endpoints, upstream's `execute` generates and leaves the reward to ours. It loads no file either.
        super().__init__(None)
        sources = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url or []
        credentials.receive()  # the URLs name them
        # The engine looks the files up, and not the driver, because their nodes may have the package in two folders.
        self.sources = [REWARD_FILES.get(source, source) for source in sources]
        self._servers = itertools.cycle(self.sources)
        self.retry_seconds = 60 * retry_minutes
        is_file = bool(self.sources) and self.sources[0].endswith(".py")
        self._process = RewardProcess(self.sources[0], timeout_seconds) if is_file else None
        if is_file:
            logger.info(f"rewards come from {self.sources[0]}")
        self._spot_checks = SpotChecks()
        self.calls = 0  # under way. Each ends within a limit of its own
        self._failure: RewardError | None = None  # of the call that ended the process
        self._waiting = 0  # samples that wait for a server
        self._down_since = self._said = 0.0

    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        """Return upstream's result, with its `reward`, `scores` and `extra_logs` as numbers.

        Raises:
            RewardError: the function raised, took too long or ended its process, no server answered in time, one
                refused the request, or the answer has no finite reward.
        """
        asked = copy(self._spot_checks.ask(sampling_params))
        asked.detokenize = False  # vLLM's text is not read, and the query has the prompt's too
        output = await super().execute(
            prompt,
            label,
            asked,
            max_length,
            hf_tokenizer,
            llm_engine,
            images=images,
        )
        fill(output, sampling_params)
        if not self.sources:
            return output
        query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
        self.calls += 1
        try:
            if self._process:
                result = await self._call_function(query, prompt, label)
            else:
                result = await self._ask_server({"query": [query], "prompts": [prompt], "labels": [label]})
        finally:
            self.calls -= 1
        try:
            answer = normalise(result, 1)
        except ValueError as error:
            raise RewardError(f"{self.sources[0]} returned {error}{_about(query, label)}") from None
        [output["reward"]], scores = answer["rewards"], answer["scores"]
        output["scores"] = output["reward"] if scores is None else scores[0]
        output[SCORES_ARE_REWARDS] = scores is None
        output["extra_logs"] = {name: value for name, [value] in answer["extra_logs"].items()}
        return output

    async def _call_function(self, query: str, prompt: str, label: Any) -> Any:
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.call, [query], [prompt], [label])
        except Raised as error:
            cause = f"raised {error.summary}"
            raise RewardError(f"{self.sources[0]}: reward_func {cause}{_about(query, label)}") from error
        except TimedOut as error:
            # Before it is killed: the other calls, which end with the process, then name this one.
            cause = f"gave {error}"
            self._failure = self._failure or RewardError(
                f"{self.sources[0]}: reward_func {cause}{_about(query, label)}"
            )
            self._process.kill()
        except Died as error:
            self._failure = self._failure or RewardError(
                f"{self.sources[0]}: {error} while it graded this sample, and perhaps others{_about(query, label)}"
            )
        raise self._failure

    async def _ask_server(self, message: dict) -> Any:
        """Return a server's answer, after as many attempts as the time allows. Each attempt asks the next server.

        Raises:
            RewardError: the time is up, or the server refuses the request itself (4xx).
        """
        clock, pause, failed = awake.Clock(longest=_ATTEMPT.total + 2 * _LONGEST_PAUSE), _FIRST_PAUSE, False
        try:
            while True:
                url = next(self._servers)
                try:
                    answer = await _post(url, message)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, RecursionError) as error:
                    cause = credentials.mask(f"{type(error).__name__}: {error}", url)
                else:
                    if failed and self._down_since:
                        logger.info(f"reward server: answers again, after {time.monotonic() - self._down_since:.0f} s")
                        self._down_since = 0.0
                    return answer
                if not failed:
                    failed = True
                    self._waiting += 1
                waited = clock()
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
    whole = credentials.expand(url)
    async with aiohttp.ClientSession(timeout=_ATTEMPT) as session, session.post(whole, json=message) as response:
        if 400 <= response.status < 500 and response.status not in (408, 429):
            text = credentials.mask((await response.text())[:500], url)
            about = _about(message["query"][0], message["labels"][0])
            raise RewardError(f"{url} refuses the request with status {response.status}: {text}{about}")
        if response.status >= 400:
            raise OSError(f"status {response.status}: {(await response.text())[:500]}")
        return await response.json(content_type=None)


def _about(query: str, label: Any) -> str:
    return f"\nlabel: {str(label)[:2000]}\nquery: {query}"
