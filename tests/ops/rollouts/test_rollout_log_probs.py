"""vLLM is asked for the log-probs of some samples, and each sample has log-probs that fit its tokens."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.engine_fakes import Engine, Tokenizer
from vllm import SamplingParams

from arlopti_openrlhf.ops.rollouts.reward_client import EVERY, RewardExecutor


class AskedEngine(Engine):
    """Notes which log-probs it is asked for. Those of each token are -0.5."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        self.asked.append(sampling_params.logprobs)
        output = await super().generate(prompt_token_ids, sampling_params)
        if sampling_params.logprobs is not None:
            [answer] = output.outputs
            answer.logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in answer.token_ids]
        return output


def outputs(*samples: SamplingParams) -> tuple[list[dict], list[int | None]]:
    executor, engine = RewardExecutor(), AskedEngine()

    async def run() -> list[dict]:
        return [await executor.execute("prompt", "label", each, 100, Tokenizer(), engine) for each in samples]

    return asyncio.run(run()), engine.asked


def test_one_sample_in_so_many_is_asked_for():
    params = SamplingParams(max_tokens=8)
    assert outputs(*[params] * 2 * EVERY)[1] == [0, *[None] * (EVERY - 1)] * 2
    assert params.logprobs is None  # it is shared with the other samples


def test_a_seed_says_whether_its_sample_is_asked_for():
    """Whatever an engine has sampled before."""
    chosen, other = (SamplingParams(max_tokens=8, seed=3 * EVERY + i) for i in (0, 1))
    assert outputs(other, chosen, chosen, other)[1] == [None, 0, 0, None]


@pytest.mark.parametrize("changed, asked", [({"temperature": 0.7}, None), ({"logprobs": 1}, 1)])
def test_what_is_not_comparable_is_left_alone(changed, asked):
    [output], seen = outputs(SamplingParams(max_tokens=8, **changed))
    assert seen == [asked] and (output["rollout_log_probs"] is None) == (asked is None)


def test_the_others_have_nan():
    params = SamplingParams(max_tokens=8)
    chosen, other = (torch.tensor(output["rollout_log_probs"][1:2048]) for output in outputs(params, params)[0])
    assert chosen.tolist() == [0] * 5 + [-0.5] * 7  # "prompt" has 6 tokens, and " answer" 7
    assert other.dtype == torch.float32 and other.isnan().all() and other.shape == chosen.shape
