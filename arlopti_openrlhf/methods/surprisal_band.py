"""Update only tokens whose surprisal is a normal multiple of the entropy (after RSI-S; constants unpublished).

- Paper: arXiv 2606.31575.
- Formula: w = 1[lo ≤ −ln π_old / H ≤ hi].
- Code read: four ports, which agree on the ratio and on nothing else.
- Constants: open. Both have to be given.
- Deviations: unknown. The loss divides by all tokens, which is our choice.
- Open: lo, hi and the denominator.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range

NEEDS_ENTROPIES = True


def weigh(tokens: Tokens, *, lo: float, hi: float) -> Tensor:
    """Return 1 where the ratio lies in the band, (B, A). A certain token, π_old = 1 and H = 0, has the ratio 0.

    `lo` is at least 0, and `hi` at least `lo`; inf is no bound.
    """
    check_range("lo", lo, 0, torch.inf)
    check_range("hi", hi, lo, torch.inf)
    ratio = -tokens.log_probs / tokens.entropies.clamp(min=torch.finfo(tokens.entropies.dtype).tiny)
    return (ratio.clamp(min=0) >= lo) & (ratio <= hi)
