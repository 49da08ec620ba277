"""Low-Probability Token Isolation, as two passes.

- Paper: arXiv 2505.12929, Algorithm 1.
- Formula: w = 1[π_old < η] in the first pass, 1[π_old ≥ η] in the second.
- Code read: github.com/zhyang2226/AR-Lopti at cbeb333.
- Constants: η = 0.5.
- Deviations: both passes divide by all tokens of the mini-batch, as in the paper's text; the authors' code divides by
  those of each micro-batch. Their mask for Fig. 6a keeps the KL loss of all tokens; one group alone drops the other's.
"""

from collections.abc import Mapping

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, WeightSums
from arlopti_openrlhf.token_update import low_probability_mask, probability_quantile

LOW, HIGH = "low", "high"
ORDERS = {"low_first": (LOW, HIGH), "high_first": (HIGH, LOW)}


def statistic(tokens: Tokens, *, quantile: float) -> float:
    """Return the η below which a share `quantile` of the rollout batch's tokens lies."""
    return probability_quantile(tokens.log_probs, tokens.mask, quantile)


def weigh(
    tokens: Tokens,
    statistic: float | None,
    *,
    eta: float = 0.5,  # η in (0, 1]
    quantile: float | None = None,  # share of the tokens in the low group, in (0, 1), in place of η
    order: str = "low_first",
    groups: str = "both",  # or one alone: low, high
) -> dict[str, Tensor]:
    """Return the low group and the high group by name, (B, A) each, in the order of their passes.

    `statistic` is η where it follows from the quantile.
    """
    if order not in ORDERS or groups not in ("both", LOW, HIGH):
        raise ValueError(f"order must be low_first or high_first, and groups both, low or high: {order}, {groups}")
    threshold = eta if statistic is None else statistic
    low = low_probability_mask(tokens.log_probs, tokens.mask, threshold)
    masks = {LOW: low, HIGH: tokens.mask.bool() & ~low}
    return {group: masks[group] for group in ORDERS[order] if groups in ("both", group)}


def metrics(sums: Mapping[str, WeightSums], statistic: float | None, *, eta: float) -> dict[str, float]:
    """Return the low group's share of the tokens, and η."""
    low_share = sums[LOW].mean if LOW in sums else sums[HIGH].zero_share
    return {"lopti/low_share": low_share, "lopti/eta": eta if statistic is None else statistic}
