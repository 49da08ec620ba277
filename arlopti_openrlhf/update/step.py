"""The life of a micro-batch, from its tokens to its loss (docs/architecture.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from openrlhf.models import Actor, PolicyLoss, aggregate_loss
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf.forward.lm_head import statistics_of_logits
from arlopti_openrlhf.forward.selective_actor import SelectiveActor


@dataclass(frozen=True)
class MicroBatch:
    """The B samples of one forward pass, on the device, with A response positions."""

    experience: Experience  # upstream's, padded
    gives_old_log_probs: bool  # this forward gives π_old, and so the weights, which are not known before
    weights: Tensor  # (B, A) factors of the advantages
    updated: Tensor  # (B, A) mask of the tokens that the pass updates; the response where it is not known
    is_idle: Tensor  # (B,) bool: nothing in the response has a gradient
    denominators: dict  # of the whole optimizer step (upstream's `get_loss_batch_info`)
    share: float  # of the optimizer step, which scales losses that are means over a micro-batch


@dataclass(frozen=True)
class Objective:
    """What the loss is made of."""

    policy_loss: PolicyLoss
    args: SimpleNamespace  # upstream's nested arguments
    kl_ctl: float  # coefficient of the KL loss
    aux_loss_coef: float | None  # of the experts' balancing loss; None where there is none


class Result(NamedTuple):
    """What the step has computed, (B, A) except for the loss and the output."""

    loss: Tensor  # scalar, with graph
    output: ModelOutput
    log_probs: Tensor  # log π_θ of the selected tokens, with graph; 0 elsewhere
    policy_log_probs: Tensor  # a view of them, which the policy loss alone reads
    old_log_probs: Tensor  # log π_old
    weights: Tensor
    group: Tensor  # nonzero on the tokens that the pass updates
    selected: Tensor  # nonzero on the tokens that the forward pass computed
    logged: dict[str, Tensor | None]  # scalars


def micro_batch_loss(
    forward: Callable[[Experience, Tensor], tuple[Tensor, ModelOutput]],
    objective: Objective,
    batch: MicroBatch,
    weigh: Callable[[Tensor, ModelOutput], tuple[Tensor, Tensor]],
) -> Result:
    """Compute the loss of a micro-batch (Algorithm 1, lines 11-19).

    It restates upstream's `training_step` up to the backward pass. On upstream's actor, with weights of one, it equals
    that bit for bit.

    Args:
        forward: takes the samples and the (B, A) mask of the tokens that are wanted; returns their log π_θ and the
            model's output.
        objective: what the loss is made of.
        batch: the micro-batch.
        weigh: takes log π_old and the model's output of a forward that gives them; returns the weights and the mask
            of the tokens that the pass updates, (B, A) each.
    """
    experience, args = batch.experience, objective.args
    response, old, weights = experience.action_mask, experience.action_log_probs, batch.weights  # (B, A)

    # Which tokens are computed: those with a weight. Where π_old is not known yet, and for GSPO, whose ratio is the
    # sequence's, the whole response is. Idle responses have no gradient.
    group = response * batch.updated
    wanted = response if args.actor.policy_loss_type == "gspo" else group
    selected = (wanted * ~batch.is_idle[:, None]).to(response.dtype)

    # Forward: log π_θ of the selected tokens, 0 elsewhere.
    log_probs, output = forward(experience, selected)

    # π_old and the weights, from this forward where they are not known yet. θ has not moved since the update began.
    # π_old of the tokens that it did not compute is known.
    if batch.gives_old_log_probs:
        old = torch.where(selected.bool(), log_probs.detach(), old).masked_fill(~response.bool(), 0.0)
        weights, updated = weigh(old, output)
        group = response * updated

    # The policy loss, of the weighted advantages. It reads its own view of the log-probs, so the derivative by that
    # view holds no KL.
    policy_log_probs = log_probs.view_as(log_probs)
    loss, logged = group_policy_loss(
        objective.policy_loss,
        policy_log_probs,
        old,
        experience.advantages * weights,
        group=group,
        selected=selected,
        response=response,
        rollout_log_probs=experience.rollout_log_probs,
        loss_batch_info=batch.denominators,
    )

    # Upstream's penalties, of the same tokens: the KL to the reference, the experts' balance, the entropy.
    if args.algo.kl.use_loss:
        kl, difference = _kl(args, log_probs, old, experience.base_action_log_probs)
        mean_kl = aggregate_loss(kl, group, **batch.denominators)
        loss = loss + mean_kl * objective.kl_ctl
        logged |= {"kl": mean_kl, "logprobs_diff": (difference * group).sum() / group.sum().clamp(min=1)}
    if objective.aux_loss_coef is not None:
        loss = loss + output.aux_loss * objective.aux_loss_coef * batch.share
    if args.actor.entropy_coef is not None:
        entropy = aggregate_loss(output.entropy[:, -group.shape[1] :], group, **batch.denominators)
        logged["entropy_loss"] = entropy
        if args.actor.entropy_coef != 0:
            loss = loss - entropy * args.actor.entropy_coef
    return Result(loss, output, log_probs, policy_log_probs, old, weights, group, selected, logged)


def group_policy_loss(
    policy_loss: PolicyLoss,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    group: Tensor,
    selected: Tensor,
    response: Tensor,
    rollout_log_probs: Tensor | None,
    loss_batch_info: dict,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return upstream's loss over the whole response, with the gradient of the selected tokens of `group` alone.

    The other tokens are held constant. So every denominator and every sequence-level statistic (seq-mean-token-mean,
    GSPO's ratio, the importance-sampling gate) stays that of the response. At one θ the groups' gradients add up to
    the whole gradient.

    Args:
        policy_loss: upstream's loss.
        log_probs: (B, A) log π_θ of the selected tokens, with graph.
        old_log_probs: (B, A) log π_old.
        advantages: (B, A), reweighted already.
        group: (B, A), nonzero on the tokens that the pass updates.
        selected: (B, A), nonzero on the tokens that the forward pass computed. GSPO needs all of a response.
        response: (B, A), nonzero on response tokens.
        rollout_log_probs: (B, A) log-probs of the engine that sampled, for the importance-sampling correction.
        loss_batch_info: upstream's denominators (`get_loss_batch_info`).

    Returns:
        The loss, and the scalars that upstream logs. `ppo_clip_ratio` and `ppo_kl` are means over the tokens of
        `group`; those that were not selected count as unmoved. For GSPO, whose ratio is the sequence's, they are means
        over the response. A mean over no tokens is 0. The last two are None without importance-sampling correction.
    """
    selected = selected.bool()
    has_gradient = selected & group.bool()
    if policy_loss.policy_loss_type == "gspo":
        held_constant = torch.where(selected, log_probs.detach(), old_log_probs)
        log_probs, scale = torch.where(has_gradient, log_probs, held_constant), 1
    else:
        # Elsewhere the ratio is 1 and the advantage 0: no value and no gradient.
        log_probs = torch.where(has_gradient, log_probs, old_log_probs)
        advantages = advantages * has_gradient
        scale = response.sum() / group.sum().clamp(min=1)
    loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        action_mask=response,
        rollout_log_probs=rollout_log_probs,
        **loss_batch_info,
    )
    any_token = response.any()

    def mean(value: Tensor | None, scale: Tensor | int = 1) -> Tensor | None:
        return None if value is None else torch.where(any_token, value.detach() * scale, 0.0)

    return loss, {
        "policy_loss": loss,
        "ppo_clip_ratio": mean(clip_ratio, scale),
        "ppo_kl": mean(ppo_kl, scale),
        "vllm_kl": mean(vllm_kl),
        "is_filter_ratio": mean(is_filter_ratio),
    }


def _kl(args: SimpleNamespace, log_probs: Tensor, old: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return upstream's estimate of the KL to the reference, and log π_θ − log π_ref, (B, A) each."""
    if args.algo.kl.init_coef <= 0:  # there is no reference
        return torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    kl = compute_approx_kl(
        log_probs,
        reference,
        log_probs_old=old,
        kl_estimator=args.algo.kl.estimator,
        unbiased_gradient=args.algo.kl.unbiased_gradient,
    )
    return kl, log_probs.detach().float() - reference.float()


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
    is_selective = isinstance(actor, SelectiveActor) and not actor.is_vlm
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
