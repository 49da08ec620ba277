"""Leave out tokens that have moved far from the rollout policy already, in the direction of their advantage (DPPO).

- Paper: arXiv 2602.04879, Binary-TV.
- Formula: w = 0 where A > 0 and π_old − μ > δ, or A < 0 and π_old − μ < −δ, else 1. μ is the probability that the
  rollout policy gave the token.
- Code read: prime-rl's `loss.py` and verl's `core_algos.py` (`dppo_tv`), in copies of 2026.
- Constants: δ = 0.2 both ways, prime-rl's default. verl takes PPO's clipping bounds for it.
- Deviations: the paper's π is the policy of the moment, ours π_old, so that in later steps of a rollout batch the mask
  stays as it is. It stands beside PPO's clipping, which the paper's takes the place of. The factor π_old / μ of the
  paper's loss is OpenRLHF's importance-sampling correction. `--algo.advantage.is_correction_threshold 0 inf` leaves
  that factor as it is, and nothing else of the correction.
"""

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, check_range
from arlopti_openrlhf.token_update import token_probabilities

NEEDS_ROLLOUT_LOG_PROBS = True


def weigh(tokens: Tokens, *, delta: float = 0.2) -> Tensor:
    """Return 0 on the tokens that have moved by more than δ with their advantage, else 1, (B, A). δ is in [0, 1]."""
    check_range("delta", delta, 0, 1)
    moved = tokens.probabilities - token_probabilities(tokens.rollout_log_probs)
    return ~((moved * tokens.advantages.sign()) > delta)
