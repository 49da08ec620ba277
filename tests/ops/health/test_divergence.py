"""Bad steps in a row are counted by their metrics."""

import math

import pytest

from arlopti_openrlhf.ops.health.divergence import BadSteps

GOOD = {
    "policy_loss": 0.1,
    "kl": 0.0,
    "skipped_optimizer_steps": 0,
    "reward": math.nan,
    "generated_samples": ["", 0.0],
}


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ({"policy_loss": math.nan}, "step 7: policy_loss is nan"),
        ({"lopti/low/policy_loss": math.inf}, "step 7: lopti/low/policy_loss is inf"),
        ({"critic_loss": -math.inf}, "step 7: critic_loss is -inf"),
        ({"skipped_optimizer_steps": 2}, "step 7: 2 optimizer steps refused"),
        ({"kl": math.nan, "skipped_optimizer_steps": 1}, "step 7: kl is nan, 1 optimizer steps refused"),
    ],
)
def test_what_is_bad(bad, cause):
    steps = BadSteps(3, counts_refusals=True)
    assert steps.add(6, GOOD) is None and not steps.is_bad
    assert steps.add(7, GOOD | bad) == cause and steps.is_bad


def test_only_steps_in_a_row_are_too_many():
    steps = BadSteps(3, counts_refusals=True)
    too_many = []
    for step, is_bad in enumerate((1, 1, 0, 1, 1, 1)):
        steps.add(step, GOOD | {"skipped_optimizer_steps": is_bad})
        too_many.append(steps.are_too_many)
    assert too_many == [False] * 5 + [True]
    assert [cause.partition(":")[0] for cause in steps.causes] == ["step 3", "step 4", "step 5"]


def test_in_fp16_a_refusal_alone_is_the_search_for_a_loss_scale():
    steps = BadSteps(1, counts_refusals=False)
    assert steps.add(1, GOOD | {"skipped_optimizer_steps": 1}) is None
    assert steps.add(2, GOOD | {"skipped_optimizer_steps": 1, "policy_loss": math.nan})
