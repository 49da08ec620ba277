"""Lower the tokens whose log-prob goes far with, or far against, their advantage (CW-GRPO).

- Paper: arXiv 2605.11538.
- Formula: w = exp(−c² / 2σ²), divided by its mean, where c = (ln π − mean ln π) · (A − mean A) and σ is the standard
  deviation of c.
- Code read: none is public.
- Constants: none.
- Deviations: no weight is below 1.2e-38, float32's least normal number. Beyond 14.4 σ the formula rounds to 0, and a
  token of weight 0 is not computed, so the KL and entropy terms would lose it too. Others are unknown. All means and σ
  are those of the rollout batch, by π_old. So the mean of the weights is 1 there, and `--algo.token_method_normalize`
  divides them by 1, but for rounding.
- Open: whether the means are the group's or the batch's. We have read two secondary notes and not the paper. They take
  σ from the batch, and one of them divides the weights by their mean over the group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.methods.clip_cov import covariances
from arlopti_openrlhf.token_method import Tokens


class Spread(NamedTuple):
    """What the weights need to know of the rollout batch."""

    advantage: float  # mean
    log_prob: float  # mean
    deviation: float  # σ
    weight: float = 1.0  # mean of exp(−c² / 2σ²)


def statistic(tokens: Tokens) -> Spread:
    """Return the means over all tokens, and σ."""
    mask = tokens.mask.bool()
    advantage, log_prob = (v[mask].double().mean().item() for v in (tokens.advantages, tokens.log_probs))
    c = covariances(tokens, advantage, log_prob)[mask]
    deviation = c.std(correction=0).item()
    # Of tokens with the same c, rounding leaves some.
    spread = Spread(advantage, log_prob, deviation if deviation > 1e-9 * c.abs().max().item() else 0.0)
    return spread._replace(weight=weigh(tokens, spread)[mask].mean().item())


def weigh(tokens: Tokens, statistic: Spread) -> Tensor:
    """Return exp(−c² / 2σ²) over its mean, (B, A); 1 where all tokens have the same c."""
    if not statistic.deviation:
        return torch.ones_like(tokens.log_probs)
    c = covariances(tokens, statistic.advantage, statistic.log_prob)
    kernel = (-(c / statistic.deviation).square() / 2).exp()
    return kernel.clamp(min=torch.finfo(torch.float32).tiny) / statistic.weight
