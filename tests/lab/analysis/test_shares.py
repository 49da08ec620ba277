"""Shares of the gradient equal arithmetic by hand."""

import pytest
import torch

from arlopti_openrlhf.lab.analysis import shares
from arlopti_openrlhf.lab.analysis.policy import Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch


def test_shares_by_hand():
    # Two tokens per prompt, A = 1, each the norm √2 (1 - π): π = 0.25 has 0.75/0.85 = 88% of the gradient.
    log_probs = torch.tensor([[0.25, 0.9, 0.25]] * 6).log()
    rest = 1 - log_probs.exp()
    mask = torch.tensor([[True, True, False]] * 6)
    found = shares.gradient_by_probability(
        Batch(mask, mask, mask, torch.ones(6, 3) * mask, torch.arange(6)),
        Tokens(log_probs, rest.square(), torch.zeros(6, 3)),
    )
    assert found["low_tokens"] == 0.5 and found["low_gradient"] == pytest.approx(0.75 / 0.85)
    by_alpha, by_eta = found["low_gradient_by_alpha"], found["low_gradient_by_eta"]
    assert by_alpha["0"] == found["low_gradient"] == by_eta["0.5"]
    # α = 1: 0.75 · 0.25 = 0.1875 against 0.1 · 0.9 = 0.09.
    assert by_alpha["1"] == pytest.approx(0.1875 / 0.2775, rel=1e-4)
    # α = 0.2: 0.75 · 0.85 = 0.6375 against 0.1 · 0.98 = 0.098.
    assert by_alpha["0.2"] == pytest.approx(0.6375 / 0.7355, rel=1e-4)
    assert [by_eta[eta] for eta in ("0.2", "0.3", "0.8")] == pytest.approx([0, 0.75 / 0.85, 0.75 / 0.85], abs=1e-6)
