"""An update is taken, looked at and undone."""

import pytest
import torch
from arlopti_testing.analysis_fakes import flat

from arlopti_openrlhf.lab.analysis.updates import learning_rate_of, log_probs_after_update
from arlopti_openrlhf.token_update import low_probability_mask


def test_an_update_is_undone_and_lopti_takes_two_steps(policy, batch, tokens):
    low = low_probability_mask(tokens.log_probs, batch.action_mask, 0.1)
    stages = [low, batch.action_mask & ~low]
    both = log_probs_after_update(policy, batch, tokens.log_probs, batch.advantages, stages, 1e-3)
    assert torch.equal(flat(policy.parameters), flat(policy.start))
    moments = [policy.zeros(), policy.zeros()]
    low, high = (
        policy.gradient(batch, tokens.log_probs, batch.advantages, *pair) for pair in zip(stages, moments, strict=True)
    )
    shared = [(a + b) / 2 for a, b in zip(*moments, strict=True)]
    policy.step(low, shared, 1e-3)
    second = policy.gradient(batch, tokens.log_probs, batch.advantages, stages[1])
    policy.step(second, shared, 1e-3)
    expected = policy.log_probs(batch)
    policy.restore()
    assert torch.allclose(both, expected, atol=1e-4)
    assert not torch.allclose(flat(second), flat(high), atol=1e-6)  # the second stage sees the moved weights


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_learning_rate_gives_the_change_that_is_asked_for(policy, batch, tokens, monkeypatch, optimizer):
    monkeypatch.setattr(policy, "optimizer", optimizer)
    moments = policy.zeros()
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    rate = learning_rate_of(policy, batch, tokens.log_probs, gradient, moments, 0.01)
    after = log_probs_after_update(
        policy, batch, tokens.log_probs, batch.advantages, [batch.action_mask], rate, moments
    )
    change = (after - tokens.log_probs)[batch.action_mask]
    assert change.square().mean().sqrt().item() == pytest.approx(0.01, rel=0.1)
    # The objective rises.
    assert (change * batch.advantages[batch.action_mask]).sum() > 0
