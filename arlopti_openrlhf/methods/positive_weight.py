"""Lower right answers against wrong ones (λ-weighted GRPO, after W-REINFORCE).

- Paper: arXiv 2506.01347.
- Formula: w = λ where A > 0, else 1.
- Code read: github.com/TianHongZXY/RLVR-Decomposed at a5d4e7c.
- Constants: λ = 0.1. λ = 0 is its Negative Sample Reinforcement.
- Deviations: the original has rewards of 1 and −1 and no group baseline. With GRPO's advantages it is λ-weighted GRPO.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range


def weigh(tokens: Tokens, *, positive: float = 0.1) -> Tensor:
    """Return λ where A > 0, else 1, (B, A)."""
    check_range("positive", positive, 0, torch.inf)
    return torch.where(tokens.advantages > 0, positive, torch.ones_like(tokens.log_probs))
