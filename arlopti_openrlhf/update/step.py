"""The life of a micro-batch, from its tokens to its loss (docs/architecture.md)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from arlopti_openrlhf.forward.shared_prompt import PackedBatch
from arlopti_openrlhf.forward.transfer import on_device


@dataclass(frozen=True)
class Weighed:
    """What a pass makes of the tokens of a micro-batch."""

    weights: Tensor  # (B, A) factors of the advantages
    group: Tensor  # (B, A), nonzero on the tokens that the pass updates
    places: Tensor  # (N,) index of each of them in the flattened group

    @classmethod
    def of(cls, weights: Tensor, group: Tensor) -> "Weighed":
        """Find the places. Of tensors on a GPU the host waits for them."""
        return cls(weights, group, group.flatten().nonzero()[:, 0])


@dataclass(frozen=True)
class MicroBatch:
    """The B samples of one forward pass, with A response positions."""

    experience: Experience  # upstream's, padded
    weighed: Weighed  # the whole response where the weights are not known before the forward
    selected: Tensor  # (B, A), nonzero on the tokens that the forward computes (`selection`)
    layout: PackedBatch | None  # how it does (`SelectiveActor.lay_out`); None on upstream's actor
    gives_old_log_probs: bool  # this forward gives π_old
    denominators: dict  # of the whole optimizer step (upstream's `get_loss_batch_info`)
    share: float  # of the optimizer step, which scales losses that are means over a micro-batch

    def to(self, device: torch.device | int) -> "MicroBatch":
        """Return it on the device, in one copy. What only metrics read stays where it is: `experience.info`."""
        parts = [self.experience, self.weighed, *([self.layout] if self.layout else [])]
        mine, experience, weighed, *layout = on_device([self, *parts], device)
        return replace(mine, experience=experience, weighed=weighed, layout=layout[0] if layout else None)


def selection(response: Tensor, group: Tensor, is_idle: Tensor, loss_type: str) -> Tensor:
    """Return (B, A), nonzero on the tokens that a forward computes: those with a weight, and none of idle responses.

    GSPO's ratio is the sequence's, so it needs the whole response.

    Args:
        response: (B, A), nonzero on response tokens.
        group: (B, A), nonzero on the tokens that the pass updates; the response where that is not known.
        is_idle: (B,) bool, whether nothing in the response has a gradient.
        loss_type: upstream's `--actor.policy_loss_type`.
    """
    wanted = response if loss_type == "gspo" else group
    return (wanted * ~is_idle[:, None]).to(response.dtype)


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
    weighed: Weighed
    logged: dict[str, Tensor | None]  # scalars


def micro_batch_loss(
    forward: Callable[[MicroBatch], tuple[Tensor, ModelOutput]],
    objective: Objective,
    batch: MicroBatch,
    weigh: Callable[[Tensor, ModelOutput], Weighed] | None = None,
) -> Result:
    """Compute the loss of a micro-batch (Algorithm 1, lines 11-19).

    It restates upstream's `training_step` up to the backward pass. On upstream's actor, with weights of one, it equals
    that bit for bit.

    Args:
        forward: takes the micro-batch; returns log π_θ of the selected tokens and the model's output.
        objective: what the loss is made of.
        batch: the micro-batch, on the device.
        weigh: takes log π_old and the model's output of a forward that gives them; returns the weights, where they are
            not known before.
    """
    experience, args, selected, weighed = batch.experience, objective.args, batch.selected, batch.weighed
    response, old = experience.action_mask, experience.action_log_probs  # (B, A)

    # Forward: log π_θ of the selected tokens, 0 elsewhere.
    log_probs, output = forward(batch)

    # π_old and the weights, from this forward where they are not known yet. θ has not moved since the update began.
    # π_old of the tokens that it did not compute is known.
    if batch.gives_old_log_probs:
        old = torch.where(selected.bool(), log_probs.detach(), old).masked_fill(~response.bool(), 0.0)
        weighed = weigh(old, output) if weigh else weighed
    group = weighed.group

    # The policy loss, of the weighted advantages. It reads its own view of the log-probs, so the derivative by that
    # view holds no KL.
    policy_log_probs = log_probs.view_as(log_probs)
    loss, logged = group_policy_loss(
        objective.policy_loss,
        policy_log_probs,
        old,
        experience.advantages * weighed.weights,
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
    return Result(loss, output, log_probs, policy_log_probs, old, weighed, logged)


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
    batch: MicroBatch,
    *,
    ring_attn_group,
    with_entropy: bool,
    with_statistics: bool,
    with_aux_loss: bool,
) -> tuple[Tensor, ModelOutput]:
    """Return (B, A) log π_θ of the selected tokens with their graph, and the model's output.

    Args:
        actor: the policy.
        batch: the micro-batch, on the device.
        ring_attn_group: upstream's group of ranks that share a sequence, or None.
        with_entropy: whether the output must hold the entropies with their gradient.
        with_statistics: whether `output.statistics` must hold (B, A) entropies and Σ_{j≠o} P_j² of the distributions,
            without a gradient.
        with_aux_loss: whether the output must hold the experts' balancing loss.
    """
    experience, selected = batch.experience, batch.selected
    options: dict = {"return_entropy": with_entropy}
    is_selective = batch.layout is not None
    if is_selective:
        options |= {"return_statistics": with_statistics, "return_aux_loss": with_aux_loss, "layout": batch.layout}
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
