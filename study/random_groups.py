"""Lopti's two passes with groups drawn at random: the control that tests whether probability matters.

Each response keeps the sizes of its groups. Which tokens are in them follows from the seed and the response alone, so
passes, epochs and ranks agree.
"""

from hashlib import sha256

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Tokens
from arlopti_openrlhf.token_update import low_probability_mask


def weigh(tokens: Tokens, *, eta: float = 0.5, seed: int = 0) -> dict[str, Tensor]:
    """Return Lopti's masks (Algorithm 1), permuted over the tokens of each response.

    Args:
        tokens: (B, A).
        eta: Lopti's η in (0, 1].
        seed: of the draws, together with a response's log-probs.
    """
    low, mask = low_probability_mask(tokens.log_probs, tokens.mask, eta), tokens.mask.bool()
    for row, places, log_probs in zip(low, mask, tokens.log_probs, strict=True):
        digest = sha256(repr((seed, log_probs[places].tolist())).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        row[places] = row[places][torch.randperm(int(places.sum()), generator=generator)]
    return {"low": low.float(), "high": (mask & ~low).float()}
