"""Turns samples into experience as OpenRLHF does, but for short batches, equal rewards and the reference of LoRA."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import launcher

from arlopti_openrlhf.ops.lifecycle import progress
from arlopti_openrlhf.patching import replaced_attribute


class ExperienceMaker(upstream.RemoteExperienceMaker):
    """`RemoteExperienceMaker` that guards `group_norm` against rounding.

    The samples of a prompt have the advantages of a reward of 0 where their rewards are all equal: 0, or those of the
    KL penalty. Upstream divides the rounding error of their mean by a standard deviation of 0 + 1e-9, so eight rewards
    of 0.1 have the advantage -7.45. This is a deliberate difference to stock, even with all methods off
    (docs/flags.md). Other groups keep stock's bits. The other estimators divide by no group's deviation.
    """

    def __init__(self, actors, critics, rewards, reference, kl_controller, strategy, *args, **kwargs) -> None:
        if reference is None and strategy.args.algo.kl.init_coef > 0:
            reference = ReferenceInPolicy(actors)
        super().__init__(actors, critics, rewards, reference, kl_controller, strategy, *args, **kwargs)

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return micro-batches, of which each rank of each model gets as many as the others (`divide`)."""
        if self.args.train.dynamic_batch_enable:
            return super().split_rollout_samples(rollout_samples)
        for place, sample in enumerate(rollout_samples):
            sample.index = [place]
        models = self.actor_model_group, self.critic_model_group, self.reward_model_group, self.initial_model_group
        ranks = [len(m._actor_handlers) // m.duplicate_actors for m in models if hasattr(m, "_actor_handlers")]
        bounds = divide(len(rollout_samples), self.args.rollout.micro_batch_size, ranks)
        pad = self.tokenizer.pad_token_id
        return [Experience.concat_experiences(rollout_samples[a:b], pad) for a, b in itertools.pairwise(bounds)]

    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return upstream's experience, and report that it is being made."""
        progress.say("phase", progress.Phase("experience"))
        return super().make_experience_batch(rollout_samples)

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Return upstream's experience, in which a response without tokens has means of 0, as in the update."""
        for experience in (experiences := super().make_experience(samples_list)):
            is_empty = ~experience.action_mask.bool().any(dim=-1)
            for name in ("kl", "logprobs_diff"):
                experience.info[name] = experience.info[name].masked_fill(is_empty, 0.0)
        return experiences

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Return upstream's result, in which equal rewards count as 0 under `group_norm`."""
        if self.args.algo.advantage.estimator != "group_norm":
            return super().compute_advantages_and_returns(experiences)
        rewards: list[torch.Tensor] = []
        apply_length_penalties = upstream.apply_length_penalties

        def penalize(experiences: list[Experience], args) -> None:
            """Apply upstream's penalties, after which the rewards are those that it normalizes."""
            apply_length_penalties(experiences, args)
            rewards.extend(experience.rewards for experience in experiences)
            is_equal = equal_groups(experiences, args.rollout.n_samples_per_prompt)
            for experience, rows in zip(experiences, is_equal, strict=True):
                experience.rewards = experience.rewards.masked_fill(rows, 0.0)

        with replaced_attribute(upstream, "apply_length_penalties", penalize):
            experiences = super().compute_advantages_and_returns(experiences)
        for experience, before in zip(experiences, rewards, strict=True):
            experience.rewards = before
        return experiences


def divide(samples: int, size: int, ranks: Sequence[int]) -> list[int]:
    """Return the bounds of as many micro-batches for each rank of each model, of about `size` samples at most.

    Upstream's ranks get unequal numbers of them if the last rollout batch of an episode is shorter. Under ZeRO-3 all
    take part in each forward pass, so those with more would wait for good.
    """
    common = math.lcm(*ranks)
    count = min(-(-samples // (size * common)), samples // common) * common or samples
    return [samples * i // count for i in range(count + 1)]


def equal_groups(experiences: Sequence[Experience], group_size: int) -> list[torch.Tensor]:
    """Return which samples belong to a prompt with equal rewards for all its samples.

    Args:
        experiences: micro-batches of B samples. `index` (B,) is each sample's place in the rollout batch, where the
            samples of a prompt are neighbours.
        group_size: samples per prompt.

    Returns:
        One tensor (B,) of booleans per micro-batch.
    """
    sizes = [len(experience.index) for experience in experiences]
    index = torch.tensor([place for experience in experiences for place in experience.index])
    rewards = torch.cat([experience.rewards for experience in experiences])
    in_order = torch.empty_like(rewards)
    in_order[index] = rewards
    groups = in_order.reshape(-1, group_size)
    is_equal = (groups == groups[:, :1]).all(dim=-1)
    return list(is_equal[index // group_size].split(sizes))


class ReferenceInPolicy:
    """Stands for the group of reference actors. It has the two methods that OpenRLHF's experience maker calls.

    Args:
        policy: OpenRLHF's group of policy actors.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def async_run_method_batch(self, method_name: str, **kwargs) -> list:
        """Return what the policy's actors do in a reference's place. `forward` is the one method that they have so."""
        return self._policy.async_run_method_batch(method_name=f"{method_name}_reference", **kwargs)

    def async_run_method(self, method_name: str) -> list:
        """Return what the policy's actors do. `empty_cache` is the one method that OpenRLHF calls so."""
        return self._policy.async_run_method(method_name=method_name)


def without_reference(group: type) -> Callable[..., Any]:
    """Return what makes upstream's groups of actors, and None in place of that of the reference.

    `openrlhf.cli.train_ppo_ray` alone gets it, because Ray pickles groups by the name in `launcher`.

    Args:
        group: upstream's `RayActorGroup`.
    """

    def make_group(num_nodes: int, num_gpus_per_node: int, ray_actor_type: Any, **kwargs) -> Any:
        if ray_actor_type is launcher.ReferenceModelActor:
            return None
        return group(num_nodes, num_gpus_per_node, ray_actor_type, **kwargs)

    return make_group
