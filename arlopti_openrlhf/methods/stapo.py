"""Leave out rare tokens of right answers where the policy was certain of others (STAPO).

- Paper: arXiv 2602.15620, versions 4 and 5. Version 1 differs.
- Formula: w = 0 where A > 0, π_old < τ and H < the κ-quantile of H over {A > 0, π_old < τ}; else 1.
- Code read: none is public.
- Constants: τ = 0.002, κ = 0.75. The loss divides by the tokens that are left.
- Deviations: the paper's quantile is a mini-batch's, ours the rollout batch's.
- Open: how the paper interpolates the quantile. Ours is the ⌈κn⌉-th smallest value.
"""

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range, smallest

NEEDS_ENTROPIES = True
DIVIDES_BY_KEPT = True


def statistic(tokens: Tokens, *, tau: float, kappa: float) -> float:
    """Return the κ-quantile of the entropies of rare tokens with A > 0, in nats; −inf where there is no such token."""
    check_range("tau", tau, 0, 1)
    check_range("kappa", kappa, 0, 1)
    return smallest(tokens.entropies[_is_rare_and_right(tokens, tau)], kappa)


def weigh(
    tokens: Tokens,
    statistic: float,
    *,
    tau: float = 0.002,  # τ in [0, 1]: tokens with π_old < τ are rare
    kappa: float = 0.75,  # κ in [0, 1], the share of them that is left out
) -> Tensor:
    """Return 0 on rare tokens with A > 0 and an entropy below the threshold, else 1, (B, A)."""
    return ~(_is_rare_and_right(tokens, tau) & (tokens.entropies < statistic))


def _is_rare_and_right(tokens: Tokens, tau: float) -> Tensor:
    return (tokens.advantages > 0) & (tokens.probabilities < tau) & tokens.mask.bool()
