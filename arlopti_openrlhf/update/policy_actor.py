"""OpenRLHF's Ray actor of the policy, which here does not compute log π_old where the update gives it."""

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import launcher, ppo_actor

from arlopti_openrlhf import cpu
from arlopti_openrlhf.forward.selective_actor import SelectiveActor, UncheckedSelectiveActor
from arlopti_openrlhf.update import guard, lora, old_log_probs, partition
from arlopti_openrlhf.update.trainer import TokenUpdateTrainer


@ray.remote(num_gpus=1)
class PolicyActor(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__):
    """`PolicyModelActor` with three changes.

    1. log π_old is NaN where the trainer learns it in its first pass.
    2. Without its LoRA adapter, the policy computes the reference's log-probs too.
    3. On a machine without CUDA it refuses what would fail after the first rollout.
    """

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None) -> None:
        """Do as upstream, with its arguments.

        Raises:
            ValueError: this rank is on a CPU, and the weights would travel by a backend for GPUs, or the attention
                has no backward pass there. The pre-flight knows the driver's machine alone.
        """
        backend, attention = strategy.args.vllm.sync_backend, strategy.args.ds.attn_implementation
        if vllm_engines and cpu.uses_cpu() and backend != "gloo":
            raise ValueError(
                f"--vllm.sync_backend {backend}: the policy is on a machine without a CUDA device, where weights "
                "travel by gloo; give gloo"
            )
        if cpu.uses_cpu() and attention == "flex_attention":
            raise ValueError(
                "--ds.attn_implementation flex_attention: the policy is on a machine without a CUDA device, where "
                "PyTorch's FlexAttention has no backward pass; give sdpa"
            )
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)

    def forward(self, sequences, action_mask=None, *args, **kwargs) -> torch.Tensor:
        if self.trainer.defers_old_log_probs:
            return old_log_probs.unknown(action_mask)
        return super().forward(sequences, action_mask, *args, **kwargs)

    def forward_reference(self, *args, **kwargs) -> torch.Tensor:
        """Return the (B, A) log-probs of the base model. The arguments are those of `forward`."""
        with lora.without_adapters(self.actor.model.module):
            return super().forward(*args, **kwargs)

    def first_non_finite(self) -> str | None:
        """Return the name of the first parameter on this rank that is not finite, or None."""
        return guard.first_non_finite(self.actor.model)


def install() -> None:
    """Make OpenRLHF's policy actors train with `TokenUpdateTrainer`. Called on the driver, before the CLI is imported.

    The CLI binds the actor class when it is imported. Ray pickles actor classes by value, with the globals of their
    modules as they are on the driver. So names that are rebound there reach every worker.
    """
    ppo_actor.PolicyModelActor = PolicyActor
    ppo_actor.ActorPPOTrainer = TokenUpdateTrainer
    guard.install()


def install_selective_actor(is_checked: bool = True) -> None:
    """Make policy and reference `SelectiveActor`s. Called on the driver, before Ray starts.

    Dynamic batches are dealt out to the ranks by prompt then.

    Args:
        is_checked: whether each compares its log-probs with the model's before its first pass.
    """
    ppo_actor.Actor = launcher.Actor = SelectiveActor if is_checked else UncheckedSelectiveActor
    ppo_trainer.balance_experiences = partition.balance_experiences
