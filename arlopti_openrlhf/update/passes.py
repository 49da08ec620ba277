"""The passes of an update: which mini-batch is trained with which weights, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.update import partition
from arlopti_openrlhf.update.ranks import Ranks

logger = init_logger(__name__)


class MiniBatch(NamedTuple):
    """This rank's samples of one optimizer step."""

    micro_batches: list[list[Experience]]  # single samples, unpadded

    @property
    def samples(self) -> list[Experience]:
        return [sample for micro_batch in self.micro_batches for sample in micro_batch]


@dataclass
class Pass:
    """A pass trains one mini-batch with one of the token methods' weights, which is one optimizer step."""

    index: int = 0  # of the weights, among those of the token methods' passes
    gives_old_log_probs: bool = False  # its own forward gives π_old, which nobody knows before
    num_tokens: float = 0.0  # tokens that it updates, on this rank, in the micro-batches so far


class Place(NamedTuple):
    """Says where a micro-batch stands in its mini-batch."""

    ends_mini_batch: bool
    share: float  # by which losses that are means over a micro-batch are scaled
    counts: int  # of the micro-batches that DeepSpeed and EMA count, how many are over with this one


def in_order(mini_batches: Sequence[MiniBatch], passes: int, scope: str) -> list[tuple[MiniBatch, int]]:
    """Return the mini-batches of one epoch, each with the index of its pass.

    With scope `batch`, the published order, all mini-batches take their first pass, then all the second. With
    `minibatch` each one takes both before the next.
    """
    if scope == "batch":
        return [(mini_batch, i) for i in range(passes) for mini_batch in mini_batches]
    return [(mini_batch, i) for mini_batch in mini_batches for i in range(passes)]


def mini_batches(items: list[Experience], size: int, shuffle: bool, ranks: Ranks) -> list[list[Experience]]:
    """Return this rank's samples of each mini-batch of one epoch.

    Only whole mini-batches are made, as many on every rank. Upstream would carry the gradients of a short last one
    over into the next update, which here may be another pass's. The log says how many samples are left out.

    Args:
        items: single samples, unpadded.
        size: samples of one optimizer step on this rank.
        shuffle: whether to shuffle, as upstream does. Samples of one prompt stay together, so that they can share its
            computation.
        ranks: the data-parallel ranks.
    """
    if shuffle:
        prompts = partition.by_prompt(items)
        items = [item for i in torch.randperm(len(prompts)).tolist() for item in prompts[i]]
    count = ranks.min(len(items) // size)
    _say_what_is_left_out(len(items) - count * size, size)
    return [items[i * size : (i + 1) * size] for i in range(count)]


def by_count(samples: list[Experience], micro_batch_size: int) -> MiniBatch:
    """Divide a mini-batch into micro-batches of so many samples, in their order."""
    starts = range(0, len(samples), micro_batch_size)
    return MiniBatch([samples[i : i + micro_batch_size] for i in starts])


def by_cost(samples: list[Experience], budget: int, ranks: Ranks) -> MiniBatch:
    """Divide a mini-batch into micro-batches of at most `budget` tokens, where the samples of a prompt share it.

    A collective call: each rank makes as many, because ZeRO reduces gradients in each.
    """
    micro_batches = partition.micro_batches(samples, budget)
    count = ranks.max(len(micro_batches))
    return MiniBatch(partition.micro_batches(samples, budget, count) if count > len(micro_batches) else micro_batches)


def dynamic_mini_batches(buffer: NaiveReplayBuffer, mini_batch_size: int) -> list[MiniBatch]:
    """Return upstream's mini-batches of micro-batches by token count, after `setup_dynamic_batch`."""
    batches, start = [], 0
    for step, ends_mini_batch in enumerate(buffer.dynamic_optimizer_step):
        if ends_mini_batch:
            indices = buffer.dynamic_indices[start : step + 1]
            batches.append(MiniBatch([[buffer.items[i] for i in micro_batch] for micro_batch in indices]))
            start = step + 1
    _say_what_is_left_out(len(buffer.items) - sum(len(batch.samples) for batch in batches), mini_batch_size)
    return batches


def count_responses(items: Sequence[Experience]) -> tuple[int, int]:
    """Return the response tokens of the samples, and how many samples have any: upstream's denominators."""
    lengths = [int(item.action_mask.sum()) for item in items]
    return sum(lengths), sum(length > 0 for length in lengths)


def _say_what_is_left_out(samples: int, mini_batch_size: int) -> None:
    if samples:
        logger.info(f"{samples} samples do not fill a mini-batch of {mini_batch_size}: left out")
