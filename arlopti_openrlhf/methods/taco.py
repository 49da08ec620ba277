"""Lower the tokens of right answers that are rarer than the policy's entropy lets expect (TACO).

- Paper: arXiv 2607.07976.
- Formula: r = −ln π_old − H + ln α; w = 1 − λ(1 − exp(−r)) where A > 0 and r > 0, else 1.
- Code read: github.com/xiuyilou/TACO at 7275599, the formula in its README.
- Constants: α = 0.01, λ = 0.9.
- Deviations: the authors take p and H of the current policy, ours are π_old's.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range

NEEDS_ENTROPIES = True


def weigh(
    tokens: Tokens,
    *,
    alpha: float = 0.01,  # α > 0: the larger, the more tokens are lowered
    most: float = 0.9,  # λ in [0, 1], by which a token is lowered at the most
) -> Tensor:
    """Return 1 − λ(1 − π_old exp(H) / α) where A > 0 and that is below 1, else 1, (B, A)."""
    check_range("alpha", alpha, 1e-6, torch.inf)
    check_range("most", most, 0, 1)
    risk = 1 - (tokens.log_probs + tokens.entropies).exp() / alpha  # 1 − exp(−r)
    return torch.where(tokens.advantages > 0, 1 - most * risk.clamp(min=0), torch.ones_like(risk))
