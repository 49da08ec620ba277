"""Two metrics of an update that its own do not show: refused optimizer steps, and how far vLLM is from the actor."""

import torch
from torch import distributed as dist

from arlopti_openrlhf.patching import Upstream


class ActorPPOTrainer(Upstream):
    """`ActorPPOTrainer` that also logs `skipped_optimizer_steps` and `rollout/gap`."""

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train as the classes behind this one in the order of resolution.

        Returns:
            Their metrics; how many optimizer steps were refused (`guard`); and the mean |log π_vLLM − log π_old| over
            the response tokens of all ranks, in nats. The latter is missing if vLLM was not asked. Tokens whose π_old
            is not known were not trained on, and do not count.
        """
        skipped = self.actor.model.skipped_steps
        status = super().ppo_train(kl_ctl) | {"skipped_optimizer_steps": self.actor.model.skipped_steps - skipped}
        total = count = 0.0
        for item in self.replay_buffer.items:
            if item.rollout_log_probs is not None:
                gaps = (item.action_log_probs.double() - item.rollout_log_probs.double()).abs()
                gaps = gaps[item.action_mask.bool() & ~gaps.isnan()]
                total, count = total + gaps.sum().item(), count + len(gaps)
        totals = torch.tensor([total, count], dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(totals, group=self.strategy.ds_device_mesh["dp"].get_group())
        total, count = totals.tolist()
        return status | ({"rollout/gap": total / count} if count else {})
