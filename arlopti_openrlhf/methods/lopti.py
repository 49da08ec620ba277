"""Low-Probability Token Isolation, as two passes.

- Paper: arXiv 2505.12929, Algorithm 1.
- Formula: w = 1[π_old < η] in the first pass, 1[π_old ≥ η] in the second.
- Code read: github.com/zhyang2226/AR-Lopti at cbeb333.
- Constants: η = 0.5.
- Deviations: none known. Both passes divide by all tokens of the mini-batch. The flags --algo.lopti.* train the same,
  bit for bit, and also have the quantile, the scope and the ablations.
"""

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens
from arlopti_openrlhf.token_update import HIGH, LOW, group_mask


def weigh(tokens: Tokens, *, eta: float = 0.5) -> list[Tensor]:
    """Return the low group and the high group, (B, A) each.

    Args:
        tokens: (B, A).
        eta: η in (0, 1].

    Raises:
        ValueError: `eta` is out of range.
    """
    return [group_mask(group, tokens.log_probs, tokens.mask, eta) for group in (LOW, HIGH)]
