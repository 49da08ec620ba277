"""Suggested α and η equal arithmetic by hand."""

import pytest
import torch

from arlopti_openrlhf.analysis import suggest
from arlopti_openrlhf.analysis.policy import Tokens
from arlopti_openrlhf.analysis.rollouts import Batch


def test_suggestions_by_hand():
    # Two tokens per prompt, A = 1, each the norm √2 (1 - π): π = 0.25 has 0.75/0.85 = 88% of the gradient.
    log_probs = torch.tensor([[0.25, 0.9]] * 6).log()
    rest = 1 - log_probs.exp()
    mask = torch.ones(6, 2, dtype=torch.bool)
    found = suggest.suggest(
        Batch(mask, mask, mask, torch.ones(6, 2), torch.arange(6)),
        Tokens(log_probs, rest.square(), torch.zeros(6, 2)),
    )
    assert found["low_tokens"] == 0.5 and found["low_gradient"] == pytest.approx(0.75 / 0.85)
    assert found["eta"] == {"value": 0.255, "low": 0.255, "high": 0.255}  # the upper end of 0.25's bin
    # [(1 - α) + 0.9 α] / [(1 - α) + 0.25 α] = 1.29  →  α = 0.29 / (1.29 · 0.75 - 0.1) = 0.3343
    assert found["alpha"]["value"] == pytest.approx(0.29 / (1.29 * 0.75 - 0.1), rel=1e-4)
    # α = 1: 0.75 · 0.25 = 0.1875 against 0.1 · 0.9 = 0.09.
    assert found["low_gradient_by_alpha"]["1"] == pytest.approx(0.1875 / 0.2775, rel=1e-4)


def test_an_interval_of_eta_needs_a_gradient():
    """A resample whose prompts have no advantage has no η. It does not have the smallest one."""
    log_probs = torch.tensor([[0.25, 0.9]] * 8).log()
    mask = torch.ones(8, 2, dtype=torch.bool)
    advantages = torch.zeros(8, 2)
    advantages[0] = 1
    found = suggest.suggest(
        Batch(mask, mask, mask, advantages, torch.arange(8)),
        Tokens(log_probs, (1 - log_probs.exp()).square(), torch.zeros(8, 2)),
    )
    assert found["eta"] == {"value": 0.255, "low": 0.255, "high": 0.255}
