"""OpenRLHF's Ray actor of the policy, which here does not compute log π_old where the update gives it."""

from typing import Any

from torch import Tensor

from arlopti_openrlhf.patching import Upstream
from arlopti_openrlhf.update import old_log_probs


class PolicyActor(Upstream):
    """`PolicyModelActor`, but log π_old is NaN where the trainer learns it in its first pass."""

    def init_model_from_pretrained(self, *args, **kwargs) -> Any:
        done = super().init_model_from_pretrained(*args, **kwargs)
        # DeepSpeed's timer of samples per second would wait for the device before each forward pass.
        self.actor.model.tput_timer.config.synchronized = False
        return done

    def forward(self, sequences, action_mask=None, *args, **kwargs) -> Tensor:
        if self.trainer.defers_old_log_probs:
            return old_log_probs.unknown(action_mask)
        return super().forward(sequences, action_mask, *args, **kwargs)
