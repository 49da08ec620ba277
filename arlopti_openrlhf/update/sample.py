"""A sample of the rollout batch, with what the update learns of it."""

from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience


@dataclass
class Sample(Experience):
    """A single sample of the rollout batch, unpadded, with what the update learns of its A response positions.

    The weights have one row for each pass, and are known as soon as log π_old is.
    """

    distributions: Any = None  # (2, A) entropies in nats and Σ_{j≠o} P_j²; None until a forward pass has shown them
    # (passes, A), the factors of the advantages; 0 outside the response. They are the weights, but for 1 in the other
    # groups: a loss over the sequence has the advantages of all groups.
    weights: Any = None
    updated: Any = None  # (passes, A) bool, the tokens of a weight above 0
    counted: Any = None  # (passes, A) bool, the tokens that the loss divides by
    left_out: Any = None  # (A,) bool, the tokens that a method leaves out of all its passes
    sums: Any = None  # (passes of the first method, then of the next, 4): tokens, Σ w, Σ w², tokens of weight 0


def stand_in() -> Sample:
    """Return a short sample without a response token. It is long enough for `self_check`."""
    tokens = torch.arange(64)
    return Sample(
        sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=torch.zeros(63, dtype=torch.long)
    )
