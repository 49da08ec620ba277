"""OpenRLHF's Ray actor of the policy, which here does not compute log π_old where the update gives it."""

from torch import Tensor

from arlopti_openrlhf.patching import Upstream
from arlopti_openrlhf.update import old_log_probs


class PolicyActor(Upstream):
    """`PolicyModelActor`, but log π_old is NaN where the trainer learns it in its first pass."""

    def forward(self, sequences, action_mask=None, *args, **kwargs) -> Tensor:
        if self.trainer.defers_old_log_probs:
            return old_log_probs.unknown(action_mask)
        return super().forward(sequences, action_mask, *args, **kwargs)
