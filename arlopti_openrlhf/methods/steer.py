"""Lower the tokens that change the entropy most (STEER).

- Paper: arXiv 2510.10150 (STEER), ACL 2026.
- Formula: Ω = |A| · (1 − π_old) · |ln π_old + H|; w = clamp(exp(−kΩ), w_min, 1) with k = −ln(w_min) / max(max Ω,
  0.02).
- Code read: github.com/zz-haooo/STEER at b31df71.
- Constants: w_min = 0.8, and the 0.02.
- Deviations: the authors' maximum is a micro-batch's, ours the rollout batch's. Their code has a second mapping, its
  default, which is linear in Ω, to [0.8, 1.2]. Ours is the paper's exponential one alone.
"""

import math

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range

NEEDS_ENTROPIES = True
_LEAST_MAXIMUM = 0.02


def statistic(tokens: Tokens) -> float:
    """Return the greatest Ω."""
    return _change(tokens)[tokens.mask.bool()].max().item()


def weigh(tokens: Tokens, statistic: float, *, w_min: float = 0.8) -> Tensor:
    """Return clamp(exp(−kΩ), w_min, 1), (B, A). The token of the greatest Ω, `statistic`, has the weight w_min."""
    check_range("w_min", w_min, 1e-6, 1)
    k = -math.log(w_min) / max(statistic, _LEAST_MAXIMUM)
    return (-k * _change(tokens)).exp().clamp(w_min, 1)


def _change(tokens: Tokens) -> Tensor:
    """Return Ω, (B, A)."""
    return tokens.advantages.abs() * (1 - tokens.probabilities) * (tokens.log_probs + tokens.entropies).abs()
