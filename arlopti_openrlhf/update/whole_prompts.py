"""Gives each rank whole prompts where OpenRLHF divides dynamic batches by the samples' lengths."""

from types import SimpleNamespace
from typing import Any

from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)

from arlopti_openrlhf.patching import Upstream, replaced_attribute
from arlopti_openrlhf.update.plan import cost
from arlopti_openrlhf.update.sample import Sample, by_prompt, numbered


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
    prompts = by_prompt(numbered(items))
    shares: list[list[Sample]] = [[] for _ in range(count)]
    room = [len(items) // count + (rank < len(items) % count) for rank in range(count)]
    tokens = [0] * count
    for group in sorted(prompts, key=cost, reverse=True):
        while group:
            rank = min((rank for rank in range(count) if room[rank]), key=tokens.__getitem__)
            taken, group = group[: room[rank]], group[room[rank] :]
            shares[rank] += taken
            room[rank] -= len(taken)
            tokens[rank] += cost(taken)
    order = {id(sample): i for i, sample in enumerate(sample for group in prompts for sample in group)}
    return [make_experience_batch(sorted(share, key=lambda sample: order[id(sample)])) for share in shares if share]
