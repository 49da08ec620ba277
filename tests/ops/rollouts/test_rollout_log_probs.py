"""vLLM is asked for the log-probs of some samples, and each sample has log-probs that fit its tokens."""

import numpy as np
import torch
from vllm import SamplingParams

from arlopti_openrlhf.ops.rollouts.rollout_log_probs import EVERY, SpotChecks, fill


def test_one_sample_in_so_many_is_asked_for():
    params, checks = SamplingParams(temperature=1.0), SpotChecks()
    asked = [checks.ask(params).logprobs for _ in range(2 * EVERY)]
    assert asked == [0, *[None] * (EVERY - 1)] * 2
    assert params.logprobs is None  # it is shared with the other samples


def test_a_seed_says_whether_its_sample_is_asked_for():
    """Whatever an engine has sampled before."""
    chosen, other = (
        SamplingParams(temperature=1.0, seed=3 * EVERY),
        SamplingParams(temperature=1.0, seed=3 * EVERY + 1),
    )
    checks = SpotChecks()
    assert [checks.ask(params).logprobs for params in (other, chosen, chosen, other)] == [None, 0, 0, None]


def test_what_is_not_comparable_is_left_alone():
    checks = SpotChecks()
    for params in (SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, logprobs=1)):
        assert checks.ask(params) is params
        output = {"rollout_log_probs": None, "observation_tokens": [1, 2]}
        fill(output, params)
        assert output["rollout_log_probs"] is None


def test_the_others_have_nan():
    params = SamplingParams(temperature=1.0)
    output = {"rollout_log_probs": None, "observation_tokens": [1, 2, 3]}
    fill(output, params)
    as_upstream = torch.tensor(output["rollout_log_probs"][1:2048])
    assert as_upstream.dtype == torch.float32 and as_upstream.isnan().tolist() == [True, True]
    output["rollout_log_probs"] = np.zeros(3)
    fill(output, params)
    assert not np.isnan(output["rollout_log_probs"]).any()
