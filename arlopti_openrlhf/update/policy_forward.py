"""The forward pass of a micro-batch through the policy, with what the loss and the statistics need of it."""

from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf.forward.lm_head import statistics_of_logits
from arlopti_openrlhf.forward.selective_actor import SelectiveActor


def policy_forward(
    actor: Actor,
    experience: Experience,
    selected: Tensor,
    *,
    ring_attn_group,
    with_entropy: bool,
    with_statistics: bool,
    with_aux_loss: bool,
) -> tuple[Tensor, ModelOutput]:
    """Return (B, A) log π_θ of the selected tokens with their graph, and the model's output.

    Args:
        actor: the policy.
        experience: the micro-batch, on the device.
        selected: (B, A), nonzero on the tokens that are wanted.
        ring_attn_group: upstream's group of ranks that share a sequence, or None.
        with_entropy: whether the output must hold the entropies with their gradient.
        with_statistics: whether `output.statistics` must hold (B, A) entropies and Σ_{j≠o} P_j² of the distributions,
            without a gradient.
        with_aux_loss: whether the output must hold the experts' balancing loss.
    """
    options: dict = {"return_entropy": with_entropy}
    is_selective = isinstance(actor, SelectiveActor)
    if is_selective:
        options |= {"return_statistics": with_statistics, "return_aux_loss": with_aux_loss}
    if experience.mm_train_inputs and actor.is_vlm:
        options |= merge_mm_train_inputs(experience.mm_train_inputs, experience.sequences.device)
    log_probs, output = actor(
        experience.sequences,
        selected,
        attention_mask=experience.attention_mask,
        return_output=True,
        ring_attn_group=ring_attn_group,
        packed_seq_lens=None,
        **options,
    )
    if with_statistics and not is_selective:
        output.statistics = statistics_of_logits(
            output["logits"], experience.sequences, selected, experience.attention_mask, packed=actor.packing_samples
        )
    return log_probs, output
