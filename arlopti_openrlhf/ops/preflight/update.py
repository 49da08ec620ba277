"""Describes how a run computes its update, as far as checks depend on it."""

from collections.abc import Callable
from typing import NamedTuple


class Update(NamedTuple):
    """Describes an update. The defaults are OpenRLHF's own, without an estimate of its activations.

    Attributes:
        takes_whole_steps: each rollout batch is trained in whole optimizer steps, and DeepSpeed is told where each of
            them ends. OpenRLHF's own loop carries a rest over to the next rollout batch.
        keeps_logits: the logits of a micro-batch are kept for its backward pass.
        bytes_per_token: a function of hidden size, number of layers, size of the vocabulary and whether gradients are
            checkpointed. It returns the bytes that training keeps per token for the layers and for the logits. None
            leaves activations out of the estimate of memory.
    """

    takes_whole_steps: bool = False
    keeps_logits: bool = True
    bytes_per_token: Callable[[int, int, int, bool], tuple[int, int]] | None = None


STOCK = Update()
