"""The mini-batches of a rollout batch, their micro-batches, and the order in which they are trained."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import partition
from arlopti_openrlhf.update.checkpointing import Checkpointing
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample

logger = init_logger(__name__)


class MiniBatch(NamedTuple):
    """This rank's samples of one optimizer step."""

    micro_batches: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for micro_batch in self.micro_batches for sample in micro_batch]


def in_order(mini_batches: Sequence[MiniBatch], passes: int, scope: str) -> list[tuple[MiniBatch, int]]:
    """Return the mini-batches of one epoch, each with the index of its pass.

    With scope `batch`, the published order, all mini-batches take their first pass, then all the second. With
    `minibatch` each one takes both before the next.
    """
    if scope == "batch":
        return [(mini_batch, i) for i in range(passes) for mini_batch in mini_batches]
    return [(mini_batch, i) for mini_batch in mini_batches for i in range(passes)]


def divide(
    items: list[Sample],
    actor: Actor,
    buffer: NaiveReplayBuffer,
    strategy: DeepspeedStrategy,
    ranks: Ranks,
    checkpointing: Checkpointing,
) -> tuple[list[MiniBatch], int | str]:
    """Divide this rank's samples into the mini-batches of one epoch. A collective call.

    Where prompts are shared, `checkpointing` is set to what fits the micro-batches.

    Returns:
        The mini-batches, and the budget of their micro-batches in tokens, or why prompts are not shared.
    """
    args = strategy.args
    size, is_dynamic = args.train.batch_size // ranks.count, args.train.dynamic_batch_enable
    reason = _reason_not_to_share(actor, args, ranks)
    if reason is None:
        # Upstream shuffles, but not dynamic batches.
        whole = mini_batches(items, size, not is_dynamic, ranks)
        budget = checkpointing.fit(whole, ranks, has_stepped=actor.model.global_steps > 0)
        return [by_cost(samples, budget, ranks) for samples in whole], budget
    if is_dynamic:
        buffer.setup_dynamic_batch(strategy)
        return dynamic_mini_batches(buffer, items, size), reason
    is_sharded = strategy.ring_attn_group is not None or args.ds.tensor_parallel_size > 1
    whole = mini_batches(items, size, not is_sharded, ranks)
    return [by_count(samples, buffer.sample_batch_size) for samples in whole], reason


def _reason_not_to_share(actor: Actor, args: SimpleNamespace, ranks: Ranks) -> str | None:
    """Return why the ranks do not share prompts, or None where they do. A collective call."""
    if not isinstance(actor, SelectiveActor):
        return "the update is OpenRLHF's"
    if actor.is_vlm:
        return "vision models are computed as OpenRLHF does"
    if args.actor.aux_loss_coef > 1e-8:
        return "the experts' balancing loss counts every token (--actor.aux_loss_coef)"
    reason = actor.shortcuts.reason_not_to_share if actor.shortcuts else "the model has not been checked"
    return None if ranks.min(reason is None) else reason or "another rank's model does not"


def mini_batches(items: list[Sample], size: int, shuffle: bool, ranks: Ranks) -> list[list[Sample]]:
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


def by_count(samples: list[Sample], micro_batch_size: int) -> MiniBatch:
    """Divide a mini-batch into micro-batches of so many samples, in their order."""
    starts = range(0, len(samples), micro_batch_size)
    return MiniBatch([samples[i : i + micro_batch_size] for i in starts])


def by_cost(samples: list[Sample], budget: int, ranks: Ranks) -> MiniBatch:
    """Divide a mini-batch into micro-batches of at most `budget` tokens, where the samples of a prompt share it.

    A collective call: each rank makes as many, because ZeRO reduces gradients in each.
    """
    micro_batches = partition.micro_batches(samples, budget)
    count = ranks.max(len(micro_batches))
    return MiniBatch(partition.micro_batches(samples, budget, count) if count > len(micro_batches) else micro_batches)


def dynamic_mini_batches(buffer: NaiveReplayBuffer, items: list[Sample], mini_batch_size: int) -> list[MiniBatch]:
    """Return upstream's mini-batches of micro-batches by token count, after `setup_dynamic_batch`."""
    batches, start = [], 0
    for step, ends_mini_batch in enumerate(buffer.dynamic_optimizer_step):
        if ends_mini_batch:
            indices = buffer.dynamic_indices[start : step + 1]
            batches.append(MiniBatch([[items[i] for i in micro_batch] for micro_batch in indices]))
            start = step + 1
    _say_what_is_left_out(len(items) - sum(len(batch.samples) for batch in batches), mini_batch_size)
    return batches


def _say_what_is_left_out(samples: int, mini_batch_size: int) -> None:
    if samples:
        logger.info(f"{samples} samples do not fill a mini-batch of {mini_batch_size}: left out")
