"""Raise the rarest tokens of right answers while the policy's entropy is low (STARE).

- Paper: arXiv 2606.19236.
- Formula: w⁺ on the ⌈0.1 · n⌉ rarest of the n tokens with A > 0, and in variant C2 also w⁻ on those with A < 0, while
  the mean entropy lies below 0.3 nats; else 1.
- Code read: github.com/hp-luo/STARE at 3ad99d9, `compute_stare_token_weights`.
- Constants: w⁺ = 1.1, with which variant O1 is complete (w⁻ = 1). C2 takes w⁻ = 0.9. From 14B on 1.05 and 0.95.
- Deviations: the authors take the rarest of a micro-batch, by the policy of that moment. Here they are those of the
  rollout batch, by π_old, with all that tie. Their controller may also adapt w⁺ and w⁻, and ours does not.
- Open: which tokens the mean of the authors' gate is over. Ours is over the rollout batch.
"""

import math

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range, smallest

NEEDS_ENTROPIES = True


def statistic(tokens: Tokens, *, share: float, entropy: float) -> tuple[float, float]:
    """Return the log-probs up to which tokens with A > 0 and with A < 0 are rare; −inf while the gate is closed."""
    check_range("share", share, 0, 1)
    mask = tokens.mask.bool()
    if tokens.entropies[mask].double().mean() >= entropy:
        return -math.inf, -math.inf
    right, wrong = mask & (tokens.advantages > 0), mask & (tokens.advantages < 0)
    return smallest(tokens.log_probs[right], share), smallest(tokens.log_probs[wrong], share)


def weigh(
    tokens: Tokens,
    statistic: tuple[float, float],
    *,
    positive: float = 1.1,  # w⁺ ≥ 0
    negative: float = 1.0,  # w⁻ ≥ 0; 0.9 is variant C2
    share: float = 0.1,  # of the tokens of each sign, in [0, 1]
    entropy: float = 0.3,  # the mean below which the method works, in nats
) -> Tensor:
    """Return w⁺, w⁻ or 1, (B, A). `statistic` is the log-probs up to which tokens are rare."""
    for name, value in {"positive": positive, "negative": negative}.items():
        check_range(name, value, 0, math.inf)
    right, wrong = (tokens.log_probs <= rare for rare in statistic)
    weights = torch.where(right & (tokens.advantages > 0), positive, torch.ones_like(tokens.log_probs))
    return torch.where(wrong & (tokens.advantages < 0), negative, weights)
