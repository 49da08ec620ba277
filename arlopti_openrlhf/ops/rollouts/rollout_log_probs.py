"""Asks vLLM for the log-probs of a few samples, which the update compares with the actor's (`rollout/gap`)."""

import itertools
from copy import copy

import numpy as np
from vllm import SamplingParams

# One sample in so many, beginning with the first. While vLLM works on such a sample, it normalizes the logits of all
# that it works on, and its Python takes some 10 µs more for each of the sample's tokens. One response's tokens suffice
# for a mean.
EVERY = 512


class SpotChecks:
    """Chooses the samples of one engine for which vLLM returns log-probs.

    vLLM's log-probs are those at temperature 1, whatever it samples at, and the actor's are those at the sampling
    temperature. So only samples at temperature 1 are chosen. Where OpenRLHF asks by itself, for its correction by
    importance sampling, it asks for all.
    """

    def __init__(self) -> None:
        self._count = itertools.count()

    def ask(self, sampling_params: SamplingParams) -> SamplingParams:
        """Return a sample's parameters, with the request for log-probs if it is chosen. The tokens stay the same.

        A sample's seed, where it has one (`--train.deterministic`), says whether it is, so a resumed run chooses
        the same.
        """
        if not _is_comparable(sampling_params):
            return sampling_params
        turn = next(self._count) if sampling_params.seed is None else sampling_params.seed
        if turn % EVERY:
            return sampling_params
        asked = copy(sampling_params)
        asked.logprobs, asked.flat_logprobs = 0, True  # the sampled tokens' alone
        return asked


def fill(output: dict, sampling_params: SamplingParams) -> None:
    """Put NaN into the output of a sample that was not chosen, because OpenRLHF batches all samples or none.

    Args:
        output: what the executor returns.
        sampling_params: those that `SpotChecks.ask` was given.
    """
    if _is_comparable(sampling_params) and output["rollout_log_probs"] is None:
        output["rollout_log_probs"] = np.full(len(output["observation_tokens"]), np.nan, dtype=np.float32)


def _is_comparable(sampling_params: SamplingParams) -> bool:
    return sampling_params.logprobs is None and sampling_params.temperature == 1
