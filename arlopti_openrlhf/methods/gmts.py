"""Update the tokens alone of the largest gradient, as entropy and advantage estimate it (GMTS).

- Paper: arXiv 2608.30632.
- Formula: w = 1 on the k = ⌈ρN⌉ tokens of the largest H · |A|, else 0.
- Code read: none. The paper's own was not available to us, and its formula is from a secondary note.
- Constants: ρ = 0.2. The loss divides by the selected tokens.
- Deviations: the paper's factor beside H is that of the whole loss, with the ratio, its clipping and the KL term. It
  is |A| on-policy and without a KL term, and here in every step. Tokens that tie with the k-th are selected too. So
  where less than ρ of the tokens have an advantage, all are selected, and the loss divides by N and no longer by ρN.
- Open: which tokens the paper ranks together, beyond "the batch". Here they are those of the rollout batch.
- A test by others was negative: at 1.5B, with LoRA, after 40 steps on GSM8K, pass@1 was 0.18 where the same share by
  entropy alone had 0.49 (while-ai, September 2026). Model, learning rate and steps are theirs, not the paper's.
"""

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range, smallest

NEEDS_ENTROPIES = True
DIVIDES_BY_KEPT = True


def statistic(tokens: Tokens, *, share: float) -> float:
    """Return the ⌈ρN⌉-th largest H · |A|, in nats."""
    check_range("share", share, 1e-6, 1)
    return -smallest(-_size(tokens)[tokens.mask.bool()], share)


def weigh(tokens: Tokens, statistic: float, *, share: float = 0.2) -> Tensor:
    """Return 1 where H · |A| is at least the threshold, (B, A). The share is ρ in (0, 1]."""
    return _size(tokens) >= statistic


def _size(tokens: Tokens) -> Tensor:
    return tokens.entropies * tokens.advantages.abs()
