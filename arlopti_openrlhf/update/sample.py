"""The samples of a rollout batch, one by one and as micro-batches, with the weights that an update gives them."""

from collections.abc import Iterable, Sequence
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
    sums: Tensor  # (passes of the first method, then of the next, 4): tokens, Σ w, Σ w², tokens of weight 0


@dataclass
class Sample(Experience):
    """A single sample, unpadded, with what the update learns of its A response positions."""

    prompt: int = -1  # number of its prompt in the rollout batch
    prompt_length: int = 1  # tokens before the first response token
    entropies: Any = None  # (A,) in nats; None until a forward pass has shown them
    weights: Any = None  # `Weights`; None until log π_old is known

    @property
    def length(self) -> int:
        """Return its number of tokens."""
        return len(self.sequences)


def numbered(items: Iterable[Experience]) -> list[Sample]:
    """Return single, unpadded samples of a rollout batch with the numbers of their prompts, found by their tokens."""
    numbers: dict[tuple[int, ...], int] = {}
    samples = []
    for item in items:
        length = len(item.sequences) - len(item.action_mask) + int(item.action_mask.long().argmax())
        prompt = numbers.setdefault(tuple(item.sequences[:length].tolist()), len(numbers))
        samples.append(Sample(**vars(item), prompt=prompt, prompt_length=length))
    return samples


def without_truncated(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples with those that generation truncated cut behind their prompts, without a response token.

    So no forward pass computes them, no loss or denominator counts them, and the plan gives them no room.
    """
    return [_cut(sample) if sample.truncated is not None and sample.truncated.any() else sample for sample in samples]


def _cut(sample: Sample) -> Sample:
    surplus = sample.length - sample.prompt_length - 1
    names = [
        name for name, value in vars(sample).items() if Experience.is_step_tensor_field(name) and value is not None
    ]
    parts = {name: vars(sample)[name] for name in names}
    parts = {name: value[: len(value) - surplus] for name, value in parts.items()}
    return replace(sample, **parts | {"action_mask": torch.zeros_like(parts["action_mask"])})


def by_prompt(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Group samples by their prompts, in the order in which these come first."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


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
    trained: Tensor | None = None  # (n,) which of the tokens that a forward computes these are, None for all

    @classmethod
    def of(cls, weights: Sequence[Weights], index: int) -> "PassWeights":
        """Return, on the CPU, what samples have in the pass of this index."""
        factors = pad_sequence([own.factors[index] for own in weights], batch_first=True)
        updated = pad_sequence([own.updated[index] for own in weights], batch_first=True).long()
        return cls(factors, updated, updated.flatten().nonzero()[:, 0])

    def among(self, computed: Tensor) -> "PassWeights":
        """Return them with `trained`, for a forward of the tokens at these places (N,). All are on the CPU."""
        return replace(self, trained=self.updated.flatten()[computed].nonzero()[:, 0])


@dataclass(kw_only=True)
class MicroBatch(Experience):
    """The B samples of one forward pass, padded, in one pass of the update."""

    samples: Sequence[Sample]  # what it is made of
    weights: PassWeights | None  # None if they follow from the log π_old that this forward gives
    selected: Tensor  # (B, A), nonzero on the tokens that the forward computes
    layout: PackedBatch  # how it does (`SelectiveActor.lay_out`)
    plan: PackedBatch  # the layout on the CPU
    denominators: dict  # of the whole optimizer step (upstream's `get_loss_batch_info`)
    share: float  # of the optimizer step, which scales losses that are means over a micro-batch

    def to(self, device: torch.device | int) -> "MicroBatch":
        """Return it on the device, in one copy, but for `info`, which only metrics read, `samples` and `plan`."""
        parts = [self, self.layout, *([self.weights] if self.weights else [])]
        mine, layout, *weights = on_device(parts, device)
        return replace(mine, layout=layout, weights=weights[0] if weights else None)
