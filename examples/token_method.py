"""A token method of one's own, which lowers the tokens of wrong answers that were rare anyway.

--algo.token_method examples/token_method.py --algo.token_method_args token_method.weight=0.5

Copy it, and change the ten lines.
"""

import torch

from arlopti_openrlhf.token_method import Tokens, smallest


# Asked once per rollout batch, with the response tokens of all ranks as one row (1, N). It gets the constants that it
# names. Leave it out, and the argument `statistic` below, if a response needs to know nothing of the others.
def statistic(tokens: Tokens, *, share: float) -> float:
    return smallest(tokens.probabilities, share)


# Asked for each response. It returns weights (B, A) of at least 0, here with B = 1. A token of weight 0 is not
# computed. A list of tensors takes as many optimizer steps. The command line can set what stands behind the *.
def weigh(tokens: Tokens, statistic: float, *, weight: float = 0.0, share: float = 0.2) -> torch.Tensor:
    is_rare_and_wrong = (tokens.probabilities <= statistic) & (tokens.advantages < 0)
    return torch.where(is_rare_and_wrong, weight, torch.ones_like(tokens.log_probs))
