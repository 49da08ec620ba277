"""The samples of a rollout batch, one by one and as micro-batches, with the weights that an update gives them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arlopti_openrlhf.forward.shared_prompt import PackedBatch
from arlopti_openrlhf.forward.transfer import on_device


@dataclass(frozen=True)
class Weights:
    """The weights of a sample's A response positions in P passes. Outside the response all are 0 or False."""

    # (P, A), for the advantages: the weights, except that a token's group is left aside. So the tokens of other groups
    # keep their advantages, which a loss over the sequence has.
    factors: Tensor
    updated: Tensor  # (P, A) bool, the tokens whose weight is not 0
    counted: Tensor  # (P, A) bool, the tokens that the loss divides by
    left_out: Tensor  # (A,) bool, the tokens that a method leaves out of all its passes
    sums: Tensor  # (passes of the first method, then of the next, 4): tokens, Σ w, Σ w², tokens of weight 0


@dataclass
class Sample(Experience):
    """A single sample, unpadded, with what the update learns of its A response positions."""

    distributions: Any = None  # (2, A) entropies in nats and Σ_{j≠o} P_j²; None until a forward pass has shown them
    weights: Any = None  # `Weights`; None until log π_old is known


def stand_in() -> Sample:
    """Return a short sample without a response token. It is long enough for `self_check`."""
    tokens = torch.arange(64)
    return Sample(
        sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=torch.zeros(63, dtype=torch.long)
    )


@dataclass(frozen=True)
class PassWeights:
    """The weights of a micro-batch in one pass."""

    factors: Tensor  # (B, A), for the advantages
    updated: Tensor  # (B, A), nonzero on the tokens whose weight is not 0
    places: Tensor  # (N,) index of each of those in the flattened (B, A)

    @classmethod
    def of(cls, factors: Tensor, updated: Tensor) -> "PassWeights":
        """Find the places. Synchronises with the GPU that the tensors are on."""
        return cls(factors, updated, updated.flatten().nonzero()[:, 0])

    @classmethod
    def of_samples(cls, samples: Sequence[Sample], index: int) -> "PassWeights":
        """Return, on the CPU, what samples that have been weighed have in the pass of this index."""
        factors = pad_sequence([sample.weights.factors[index] for sample in samples], batch_first=True)
        updated = pad_sequence([sample.weights.updated[index] for sample in samples], batch_first=True)
        return cls.of(factors, updated.long())


@dataclass(kw_only=True)
class MicroBatch(Experience):
    """The B samples of one forward pass, padded, in one pass of the update."""

    weights: PassWeights | None  # None where they follow from the log π_old that this forward gives
    selected: Tensor  # (B, A), nonzero on the tokens that the forward computes
    layout: PackedBatch | None = None  # how it does (`SelectiveActor.lay_out`); None on upstream's actor
    denominators: dict  # of the whole optimizer step (upstream's `get_loss_batch_info`)
    share: float  # of the optimizer step, which scales losses that are means over a micro-batch
    gives_old_log_probs: bool = False  # this forward gives π_old of the selected tokens
    samples: Sequence[Sample] = ()  # what it is made of; none in upstream's loop
    pass_index: int = 0

    def to(self, device: torch.device | int) -> "MicroBatch":
        """Return it on the device, in one copy. `info`, which only metrics read, and `samples` stay where they are."""
        parts = {"weights": self.weights, "layout": self.layout}
        parts = {name: part for name, part in parts.items() if part is not None}
        mine, *moved = on_device([self, *parts.values()], device)
        return replace(mine, **dict(zip(parts, moved, strict=True)))
