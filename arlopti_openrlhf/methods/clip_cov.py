"""Leave out a few tokens whose log-prob goes with their advantage (Clip-Cov).

- Paper: arXiv 2505.22617.
- Formula: w = 0 on max(⌊share · N⌋, 1) tokens drawn from those with low < cov < high, else 1, where
  cov = (A − mean A) · (ln π − mean ln π).
- Code read: verl at b178a3c, `core_algos.py`.
- Constants: share 2e-4, low 1, high 5.
- Deviations: verl draws in each call of the loss, from the policy of that moment, without the tokens that PPO clips.
  Here the draw is from the rollout batch, by π_old, where none is clipped yet. Tokens of equal A and π are drawn
  together. The same tokens are drawn however they are divided among ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range


class Drawn(NamedTuple):
    """The means, and the covariances of the tokens that are left out."""

    advantage: float
    log_prob: float
    covariances: Tensor


def statistic(tokens: Tokens, *, share: float, low: float, high: float) -> Drawn:
    """Return the means, and which tokens are drawn."""
    check_range("share", share, 0, 1)
    check_range("high", high, low, torch.inf)
    mask = tokens.mask.bool()
    advantage, log_prob = (v[mask].double().mean().item() for v in (tokens.advantages, tokens.log_probs))
    found = covariances(tokens, advantage, log_prob)[mask]
    candidates = found[(found > low) & (found < high)].sort().values
    count = max(int(share * mask.sum().item()), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(len(candidates)))
    return Drawn(advantage, log_prob, candidates[order[:count].to(candidates.device)])


def weigh(
    tokens: Tokens,
    statistic: Drawn,
    *,
    share: float = 2e-4,  # of all tokens, in [0, 1]; at least one is drawn
    low: float = 1.0,  # the covariance above which tokens may be drawn; inf draws none
    high: float = 5.0,  # the one below which they may
) -> Tensor:
    """Return 0 on the tokens drawn, else 1, (B, A)."""
    found = covariances(tokens, statistic.advantage, statistic.log_prob)
    return ~torch.isin(found, statistic.covariances.to(found.device))


def covariances(tokens: Tokens, mean_advantage: float, mean_log_prob: float) -> Tensor:
    """Return (A − mean A) · (ln π − mean ln π), (B, A) float64. In float32 tokens of other A and π often share one."""
    return (tokens.advantages.double() - mean_advantage) * (tokens.log_probs.double() - mean_log_prob)
