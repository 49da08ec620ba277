"""OpenRLHF's Ray actor of the policy, which here does not compute log π_old where the update gives it."""

from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import launcher, ppo_actor

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.patching import plain_class
from arlopti_openrlhf.update import lora, old_log_probs, partition
from arlopti_openrlhf.update.trainer import TokenUpdateTrainer

_PolicyModelActor: Any = plain_class(ppo_actor.PolicyModelActor)


@ray.remote(num_gpus=1)
class PolicyActor(_PolicyModelActor):
    """`PolicyModelActor` with two changes.

    1. log π_old is NaN where the trainer learns it in its first pass.
    2. Without its LoRA adapter, the policy computes the reference's log-probs too.
    """

    def forward(self, sequences, action_mask=None, *args, **kwargs) -> torch.Tensor:
        if self.trainer.defers_old_log_probs:
            return old_log_probs.unknown(action_mask)
        return super().forward(sequences, action_mask, *args, **kwargs)

    def forward_reference(self, *args, **kwargs) -> torch.Tensor:
        """Return the (B, A) log-probs of the base model. The arguments are those of `forward`."""
        with lora.without_adapters(self.actor.model.module):
            return super().forward(*args, **kwargs)


def install() -> None:
    """Make OpenRLHF's policy actors train with `TokenUpdateTrainer`. Called on the driver, before the CLI is imported.

    The CLI binds the actor class when it is imported. Ray pickles actor classes by value, with the globals of their
    modules as they are on the driver. So names that are rebound there reach every worker.
    """
    ppo_actor.PolicyModelActor = PolicyActor
    ppo_actor.ActorPPOTrainer = TokenUpdateTrainer


def install_selective_actor() -> None:
    """Make policy and reference `SelectiveActor`s. Called on the driver, before Ray starts.

    Dynamic batches are dealt out to the ranks by prompt then.
    """
    ppo_actor.Actor = launcher.Actor = SelectiveActor
    ppo_trainer.balance_experiences = partition.balance_experiences
