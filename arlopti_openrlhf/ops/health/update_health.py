"""Says of each update what was refused, and how far vLLM and the actor are apart."""

from arlopti_openrlhf.patching import Upstream


class ActorPPOTrainer(Upstream):
    """`ActorPPOTrainer` with two more metrics."""

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        skipped = self.actor.model.skipped_steps
        status = super().ppo_train(kl_ctl)
        return status | {"skipped_optimizer_steps": self.actor.model.skipped_steps - skipped}
