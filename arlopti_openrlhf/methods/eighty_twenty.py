"""Update the tokens of highest entropy alone ("Beyond the 80/20 Rule").

- Paper: arXiv 2506.01939.
- Formula: w = 1 on the k = ⌈ρN⌉ tokens of highest entropy, else 0.
- Code read: github.com/Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR at 6f5dda6; TRL at f2cd577, `grpo_trainer.py`.
- Constants: ρ = 0.2. The loss divides by the selected tokens, as in the authors' code. TRL divides by all of them.
- Deviations: the authors' code takes the k tokens of each micro-batch, TRL those of each forward pass over all ranks.
  Here they are those of the rollout batch. Tokens that tie with the k-th are selected too.
- Open: which of the scopes the paper's own runs had.
"""

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range, smallest

NEEDS_ENTROPIES = True
DIVIDES_BY_KEPT = True


def statistic(tokens: Tokens, *, share: float) -> float:
    """Return the entropy of the ⌈ρN⌉-th token, in nats."""
    check_range("share", share, 1e-6, 1)
    return -smallest(-tokens.entropies[tokens.mask.bool()], share)


def weigh(tokens: Tokens, statistic: float, *, share: float = 0.2) -> Tensor:
    """Return 1 where the entropy is at least the threshold, (B, A). The share is ρ in (0, 1]."""
    return tokens.entropies >= statistic
