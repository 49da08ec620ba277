"""Raise the rarest tokens of right answers and the most certain ones of wrong answers (A3PO without its decay).

- Paper: arXiv 2512.21625.
- Formula: s⁺ on the rarest share of a response's tokens where A > 0, s⁻ on the most probable share where A < 0, else
  1. The share of n tokens is max(1, ⌊share · n⌋).
- Code read: github.com/txy77/Sample-Polarity-of-RLVR at 24a37f7 and 12eaa47 (`core_algos.py`).
- Constants: s⁺ = s⁻ = 2, from which the paper lets them decay to 1. The README's ablation has a share of 0.2 and a
  scale of 5.
- Deviations: s stays as it is, since a token method does not know the step.
- Open: the law of the decay, and the share of the paper's main runs.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range


def weigh(
    tokens: Tokens,
    *,
    positive: float = 2.0,  # s⁺ ≥ 0, for the rarest tokens with A > 0
    negative: float = 2.0,  # s⁻ ≥ 0, for the most probable ones with A < 0
    share: float = 0.2,  # of a response's tokens, in [0, 1]
) -> Tensor:
    """Return s⁺, s⁻ or 1, (B, A). A row is a response."""
    for name, value in {"positive": positive, "negative": negative}.items():
        check_range(name, value, 0, torch.inf)
    check_range("share", share, 0, 1)
    mask = tokens.mask.bool()
    count = (mask.sum(dim=1, keepdim=True) * float(share)).double().floor().clamp(min=1)
    rank = tokens.log_probs.masked_fill(~mask, torch.inf).argsort(dim=1).argsort(dim=1)
    rank_from_above = (-tokens.log_probs).masked_fill(~mask, torch.inf).argsort(dim=1).argsort(dim=1)
    weights = torch.where((tokens.advantages > 0) & (rank < count), positive, torch.ones_like(tokens.log_probs))
    return torch.where((tokens.advantages < 0) & (rank_from_above < count), negative, weights)
