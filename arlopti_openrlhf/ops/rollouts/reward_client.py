"""Lets vLLM answer a prompt and fetches the answer's reward, or stops the run with the cause where there is none.

Upstream logs that it got no reward and continues without it. The run then dies later, of something else.
"""

import asyncio
import itertools
import random
import time
from copy import copy
from typing import Any

import aiohttp
import numpy as np
from openrlhf.utils.agent import SingleTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger
from vllm import SamplingParams

from arlopti_openrlhf import terminal
from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.rollouts import reward_http
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError, RewardProcess, about

logger = init_logger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds between attempts, doubling
_SAY_EVERY = 60.0  # seconds
# vLLM returns log-probs for one sample in so many, beginning with the first. While it works on such a sample, it
# normalizes the logits of all that it works on, and its Python takes some 10 µs more for each of the sample's tokens.
# One response's tokens suffice for a mean.
EVERY = 512
# The entry of an output that is true if its source returned no scores: the reward then takes their place.
SCORES_ARE_REWARDS = "scores_are_rewards"


class RewardExecutor(SingleTurnAgentExecutor):
    """`SingleTurnAgentExecutor` with six changes.

    1. The names of the package's rewards, such as `kk`, stand for their files.
    2. It waits for a server that does not answer.
    3. A reward function runs in a process of its own, and each call has a time limit.
    4. A reward function that raises, or a reward that is no finite number, ends the run with its cause.
    5. vLLM returns tokens and no text.
    6. It returns the log-probs of a few samples, which the update compares with the actor's (`rollout/gap`).

    Args:
        remote_rm_url: a reward of the package or the path of a Python file alone, or URLs that take turns.
        retry_minutes: how long each sample waits for a server.
        timeout_seconds: how long a call of a reward function may take.

    Raises:
        RuntimeError: the file cannot be loaded, or has no `reward_func`.
    """

    def __init__(
        self, remote_rm_url: list[str] | None = None, retry_minutes: float = 10.0, timeout_seconds: float = 300.0
    ) -> None:
        # Without endpoints, upstream's `execute` generates and leaves the reward to ours. It loads no file either.
        super().__init__(None)
        credentials.receive()  # the URLs name them
        # The engine looks the files up, and not the driver, because their nodes may have the package in two folders.
        self.sources = [REWARDS[url].path if url in REWARDS else url for url in remote_rm_url or []]
        self._servers = itertools.cycle(self.sources)
        self.retry_seconds = 60 * retry_minutes
        is_file = bool(self.sources) and self.sources[0].endswith(".py")
        self._process = RewardProcess(self.sources[0], timeout_seconds) if is_file else None
        if is_file:
            logger.info(f"rewards come from {self.sources[0]}")
        self._count = itertools.count()  # samples whose log-probs can be compared
        self._down_since = self._said = 0.0

    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        """Return upstream's result, with its `reward`, `scores` and `extra_logs` as numbers.

        Raises:
            RewardError: the function raised, took too long or ended its process, no server answered in time, one
                refused the request, or the answer has no finite reward.
        """
        asked = copy(sampling_params)
        asked.detokenize = False  # vLLM's text is not read, and the query has the prompt's too
        # vLLM's log-probs are those at temperature 1, whatever it samples at, and the actor's are those at the
        # sampling temperature. Where OpenRLHF corrects by importance sampling, it asks for the log-probs of all.
        is_comparable = sampling_params.logprobs is None and sampling_params.temperature == 1
        if is_comparable and self._is_chosen(sampling_params):
            asked.logprobs, asked.flat_logprobs = 0, True  # the sampled tokens' alone
        output = await super().execute(prompt, label, asked, max_length, hf_tokenizer, llm_engine, images=images)
        if is_comparable and output["rollout_log_probs"] is None:  # OpenRLHF batches those of all samples or of none
            output["rollout_log_probs"] = np.full(len(output["observation_tokens"]), np.nan, dtype=np.float32)
        if not self.sources:
            return output
        query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
        answer = await self.ask(query, prompt, label)
        [output["reward"]], scores = answer["rewards"], answer["scores"]
        output["scores"] = output["reward"] if scores is None else scores[0]
        output[SCORES_ARE_REWARDS] = scores is None
        output["extra_logs"] = {name: value for name, [value] in answer["extra_logs"].items()}
        return output

    async def ask(self, query: str, prompt: str, label: Any) -> dict[str, Any]:
        """Return what the source says of one sample, in the form of `normalise`.

        Raises:
            RewardError: as `execute`.
        """
        if self._process:
            result = await asyncio.to_thread(self._process.call, query, prompt, label)
        else:
            result = await self._ask_server(query, prompt, label)
        try:
            return normalise(result, 1)
        except ValueError as error:
            problem = terminal.one_line(credentials.mask(str(error), ",".join(self.sources)))
            raise RewardError(f"{self.sources[0]} returned {problem}{about(query, label)}") from None

    def _is_chosen(self, sampling_params: SamplingParams) -> bool:
        """Return whether vLLM is to return a sample's log-probs.

        The seed says so where there is one (`--train.deterministic`), so a resumed run chooses the same samples.
        """
        turn = next(self._count) if sampling_params.seed is None else sampling_params.seed
        return turn % EVERY == 0

    async def _ask_server(self, query: str, prompt: str, label: Any) -> Any:
        """Return a server's answer, after as many attempts as the time allows. Each attempt asks the next server.

        Raises:
            RewardError: the time is up, or the server refuses the request itself (4xx).
        """
        since, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            url = next(self._servers)
            try:
                answer = await reward_http.post(url, query, prompt, label)
            except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
                cause = credentials.mask(f"{type(error).__name__}: {error}", url)
            else:
                if 0 < self._down_since <= self._said:  # the log has said that samples wait
                    logger.info(f"reward server: answers again, after {time.monotonic() - self._down_since:.0f} s")
                self._down_since = 0.0
                return answer
            waited = time.monotonic() - since
            self._say(url, cause)
            if waited + pause > self.retry_seconds:
                raise RewardError(
                    f"no reward from {url} in {waited / 60:.1f} minutes (--reward.retry_minutes): {cause}"
                )
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say(self, url: str, cause: str) -> None:
        """Log why samples wait for a server, once a minute for all of them."""
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._said >= _SAY_EVERY:
            self._said = now
            logger.warning(
                f"reward server: samples wait for {url}, for {now - self._down_since:.0f} s so far, "
                f"for up to {self.retry_seconds / 60:g} minutes: {cause}"
            )
