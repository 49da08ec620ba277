"""Divides samples into micro-batches, and among the ranks, such that those of a prompt stay together and share it.

A micro-batch costs the tokens that the selective forward pass computes for it: each prompt once, and each response.
OpenRLHF divides by the number of samples, or in dynamic batches by their lengths, and so takes most prompts apart.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)

from arlopti_openrlhf.patching import Upstream, replaced_attribute

Item = TypeVar("Item", bound=Experience)


def by_prompt(items: Sequence[Item]) -> list[list[Item]]:
    """Group single, unpadded samples by their prompts."""
    prompts = defaultdict(list)
    for item in items:
        prompts[tuple(item.sequences[: _prompt_length(item)].tolist())].append(item)
    return list(prompts.values())


def cost(samples: Sequence[Experience]) -> int:
    """Return how many tokens a forward pass of these samples computes: each prompt once, and each response."""
    return sum(
        _prompt_length(group[0]) + sum(len(item.sequences) - _prompt_length(item) for item in group)
        for group in by_prompt(samples)
    )


def keys_per_token(samples: Sequence[Experience]) -> int:
    """Return how many keys attention keeps for each token that is computed, at most, rounded up.

    A shared prompt keeps its own, and each response keeps those of the prompt and its own. The shortest responses of a
    prompt have the most for a token.
    """
    most = 1.0
    for group in by_prompt(samples):
        prompt, tokens = _prompt_length(group[0]), _prompt_length(group[0])
        for count, length in enumerate(sorted(len(item.sequences) - prompt for item in group), 1):
            tokens += length
            if count > 1:
                most = max(most, 1 + count * prompt / tokens)
    return math.ceil(most)


def micro_batches(samples: Sequence[Item], budget: int, count: int = 1) -> list[list[Item]]:
    """Divide samples into micro-batches that cost at most `budget` tokens each.

    A prompt's samples are divided only where they exceed the budget alone. One sample may exceed it.

    Args:
        samples: single, unpadded samples.
        budget: tokens.
        count: how many micro-batches to make at least, of as many samples. Costly ones are halved for it.
    """
    batches: list[list[Item]] = []
    room: list[int] = []
    # First fit, the most expensive first.
    for part in sorted(_parts(samples, budget), key=cost, reverse=True):
        tokens = cost(part)
        i = next((i for i, left in enumerate(room) if tokens <= left), len(batches))
        if i == len(batches):
            batches.append([])
            room.append(budget)
        batches[i] += part
        room[i] -= tokens
    while len(batches) < count:
        costs = [cost(batch) if len(batch) > 1 else 0 for batch in batches]
        largest = batches.pop(costs.index(max(costs)))
        batches += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return batches


def _parts(samples: Sequence[Item], budget: int) -> list[list[Item]]:
    """Divide samples by prompt, and a prompt's samples into parts that cost at most `budget` tokens each."""
    parts: list[list[Item]] = []
    for group in by_prompt(samples):
        room = 0
        for item in group:
            response = len(item.sequences) - _prompt_length(item)
            if response > room:
                parts.append([])
                room = budget - _prompt_length(item)
            parts[-1].append(item)
            room -= response
    return parts


def describe(batches: Sequence[Sequence[Experience]], limit: int | str) -> str:
    """Say how many tokens of a mini-batch are computed, and why not fewer.

    Args:
        batches: its micro-batches.
        limit: the budget of each in tokens, or why prompts are not shared.
    """
    samples = [item for batch in batches for item in batch]
    total = sum(len(item.sequences) for item in samples)
    made = f"in {len(batches)} micro-batch{'es' if len(batches) > 1 else ''}"
    if isinstance(limit, str):
        return f"all {total:,} tokens are computed {made}, because {limit}"
    prompts = len(by_prompt(samples))
    divided = sum(len(by_prompt(batch)) for batch in batches) - prompts
    said = f"{sum(map(cost, batches)):,} of {total:,} tokens are computed, {made} of at most {limit:,}"
    if divided:
        said += (
            f". {prompts} prompts are computed {prompts + divided} times, because some have more responses than that"
        )
    return said


class WholePrompts(Upstream):
    """A trainer whose ranks get whole prompts where upstream's `balance_experiences` would divide dynamic batches.

    Ray pickles `BasePPOTrainer`, which calls that function, by name. So the name is replaced in the worker.
    """

    def train_step(self, *args, **kwargs) -> Any:
        from openrlhf.trainer import ppo_trainer  # with vLLM, which the policy's ranks have no use for

        with replaced_attribute(ppo_trainer, "balance_experiences", balance_experiences):
            return super().train_step(*args, **kwargs)


def balance_experiences(experiences: list[Experience], args: SimpleNamespace) -> list[Experience]:
    """Divide a rollout batch among the ranks, as upstream's function of this name, with whole prompts.

    Upstream deals out samples by length. Each rank gets as many samples as there, in the order of the rollout batch.

    Args:
        experiences: batches of samples.
        args: upstream's nested arguments.

    Returns:
        One batch per rank.
    """
    items = [item for batch in experiences for item in remove_padding_in_sequences(split_experience_batch(batch))]
    count = args.actor.num_nodes * args.actor.num_gpus_per_node
    shares: list[list[Experience]] = [[] for _ in range(count)]
    room = [len(items) // count + (rank < len(items) % count) for rank in range(count)]
    tokens = [0] * count
    for group in sorted(by_prompt(items), key=cost, reverse=True):
        while group:
            rank = min((rank for rank in range(count) if room[rank]), key=tokens.__getitem__)
            taken, group = group[: room[rank]], group[room[rank] :]
            shares[rank] += taken
            room[rank] -= len(taken)
            tokens[rank] += cost(taken)
    order = {id(item): i for i, item in enumerate(item for group in by_prompt(items) for item in group)}
    return [make_experience_batch(sorted(share, key=lambda item: order[id(item)])) for share in shares if share]


def _prompt_length(item: Experience) -> int:
    """Return how many tokens of a single, unpadded sample come before its first response token."""
    return len(item.sequences) - len(item.action_mask) + int(item.action_mask.long().argmax())
