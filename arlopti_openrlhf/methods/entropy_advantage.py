"""Add a share of the entropy to the advantage ("Reasoning with Exploration").

- Paper: arXiv 2506.14758.
- Formula: A + min(αH, |A| / κ), so w = 1 + sign(A) · min(αH / |A|, 1 / κ).
- Code read: ports of it, and a note with the whole formula; not the authors' code.
- Constants: α = 0.4 (for GRPO), κ = 2.
- Deviations: none known. A token with A = 0 stays at 0.
- Open: the formula in the authors' own code.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range

NEEDS_ENTROPIES = True


def weigh(tokens: Tokens, *, alpha: float = 0.4, kappa: float = 2.0) -> Tensor:
    """Return 1 + sign(A) · min(αH / |A|, 1 / κ), (B, A). With κ ≥ 1 no advantage changes its sign."""
    check_range("alpha", alpha, 0, 1e6)
    check_range("kappa", kappa, 1, torch.inf)
    size = tokens.advantages.abs().clamp(min=torch.finfo(tokens.advantages.dtype).tiny)
    return 1 + tokens.advantages.sign() * (alpha * tokens.entropies / size).clamp(max=1 / kappa)
