"""Turns samples into experience as OpenRLHF does, but for equal rewards and for metrics that some samples lack."""

from collections.abc import Sequence

import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class ExperienceMaker(RemoteExperienceMaker):
    """`RemoteExperienceMaker` with two changes.

    1. Under `group_norm`, the samples of a prompt have the advantage 0 where their rewards are all equal. Upstream
       divides the rounding error of their mean by a standard deviation of 0 + 1e-9, so eight rewards of 0.1 have the
       advantage -7.45. This is a deliberate difference to stock, even with all methods off (docs/flags.md). Groups
       whose rewards differ keep stock's bits. The other estimators divide by no group's deviation, so they stay as
       they are.
    2. A metric in `extra_logs` may come with some samples only. Upstream cannot batch such samples.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._incomplete: set[str] = set()  # metrics that the log has named

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return upstream's micro-batches, after each sample has got every metric."""
        for name, count in fill_missing_metrics(rollout_samples).items():
            if name not in self._incomplete:
                self._incomplete.add(name)
                logger.warning(
                    f"extra_logs: {count} of {len(rollout_samples)} samples have no `{name}`. "
                    "The logs show the mean over the others."
                )
        return super().split_rollout_samples(rollout_samples)

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Return upstream's result, with the advantage 0 for equal rewards under `group_norm`."""
        kls = [experience.kl for experience in experiences]  # upstream drops them
        experiences = super().compute_advantages_and_returns(experiences)
        if self.args.algo.advantage.estimator == "group_norm":
            # Upstream has applied length penalties by now, so the rewards are those that it has normalized.
            group_size = self.args.rollout.n_samples_per_prompt
            for experience, kl, is_equal in zip(experiences, kls, equal_groups(experiences, group_size), strict=True):
                if is_equal.any():
                    self._drop_reward(experience, kl, is_equal)
        return experiences

    def _drop_reward(self, experience: Experience, kl: torch.Tensor, rows: torch.Tensor) -> None:
        """Give the samples in `rows` (B,) the advantages of a reward of 0, which are those of the KL penalty alone."""
        reward = compute_reward(
            torch.zeros_like(experience.rewards),
            self.kl_ctl.value,
            kl,
            action_mask=experience.action_mask,
            reward_clip_range=self.args.reward.clip_range,
        )
        returns = self.get_cumulative_returns(reward, experience.action_mask, gamma=1.0)
        experience.returns = torch.where(rows[:, None], returns, experience.returns)
        experience.advantages = torch.where(rows[:, None], returns, experience.advantages)
        experience.info["return"] = torch.where(rows, reward.sum(dim=-1), experience.info["return"])
        experience.info["group_reward_std"] = experience.info["group_reward_std"].masked_fill(rows, 0.0)


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


def fill_missing_metrics(samples: Sequence[Experience]) -> dict[str, int]:
    """Give each sample every metric of the others, because upstream batches them.

    `info` is for the logs, which show its mean over the batch. A sample without a metric gets the mean of those that
    have it, so the logs show that mean.

    Args:
        samples: the single samples of one rollout batch. Their `info` holds one number (1,) per metric.

    Returns:
        metric -> how many samples had none.
    """
    missing = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.info):
        given = [sample.info[name] for sample in samples if name in sample.info]
        if len(given) == len(samples):
            continue
        missing[name] = len(samples) - len(given)
        mean = torch.cat(given).float().mean(dim=0, keepdim=True)
        for sample in samples:
            sample.info[name] = sample.info[name].float() if name in sample.info else mean
    return missing
