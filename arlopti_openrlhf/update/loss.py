"""The loss of a micro-batch in one pass, and what it does to the tokens: pure functions of tensors."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from openrlhf.models import PolicyLoss, aggregate_loss
from openrlhf.models.utils import compute_approx_kl
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf.update.sample import MicroBatch, PassWeights
from arlopti_openrlhf.update.token_statistics import TokenUpdates


class Objective(NamedTuple):
    """What an update minimizes."""

    policy_loss: PolicyLoss
    args: SimpleNamespace  # upstream's nested arguments
    kl_ctl: float  # coefficient of the KL loss
    aux_loss_coef: float  # of the experts' balancing loss, 0 without one


class MicroBatchLoss(NamedTuple):
    """The loss of a micro-batch in one pass."""

    loss: Tensor  # scalar, with graph
    logged: dict[str, Tensor | None]  # the scalars that upstream logs
    policy_log_probs: Tensor  # (B, A) a view of log π_θ for the policy loss. The derivative by it holds no KL


def pass_policy_loss(
    policy_loss: PolicyLoss, batch: MicroBatch, weights: PassWeights, log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return upstream's loss over the whole response, with the gradient of only the selected tokens that are updated.

    The other tokens are held constant. So every denominator and every sequence-level statistic (seq-mean-token-mean,
    GSPO's ratio, the importance-sampling gate) stays that of the response. At one θ the gradients of Lopti's two
    passes add up to the whole gradient.

    Args:
        policy_loss: upstream's loss.
        batch: the micro-batch, with log π_old.
        weights: of the pass. Advantages are multiplied by their factors.
        log_probs: (B, A) log π_θ of the selected tokens, with graph.

    Returns:
        The loss, and the scalars that upstream logs. `ppo_clip_ratio` and `ppo_kl` are means over the updated tokens;
        those that were not selected count as unmoved. For GSPO, whose ratio is the sequence's, they are means over
        the response. A mean over no tokens is 0. The last two are None without importance-sampling correction.
    """
    old, response, advantages = batch.action_log_probs, batch.action_mask, batch.advantages * weights.factors
    selected = batch.selected.bool()
    has_gradient = selected & weights.updated.bool()
    if policy_loss.policy_loss_type == "gspo":
        held_constant = torch.where(selected, log_probs.detach(), old)
        log_probs, scale = torch.where(has_gradient, log_probs, held_constant), 1
    else:
        # Elsewhere the ratio is 1 and the advantage 0: no value and no gradient.
        log_probs = torch.where(has_gradient, log_probs, old)
        advantages = advantages * has_gradient
        scale = response.sum() / weights.updated.sum().clamp(min=1)
    loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = policy_loss(
        log_probs,
        old,
        advantages,
        action_mask=response,
        rollout_log_probs=batch.rollout_log_probs,
        **batch.denominators,
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


def micro_batch_loss(
    batch: MicroBatch, weights: PassWeights, log_probs: Tensor, output: ModelOutput, objective: Objective
) -> MicroBatchLoss:
    """Return the loss of a micro-batch in one pass.

    It restates the loss of upstream's `training_step`. With weights of one it equals that bit for bit.

    Args:
        batch: the micro-batch, with log π_old.
        weights: of the pass.
        log_probs: (B, A) log π_θ of the selected tokens, with graph.
        output: the model's, with entropies and the experts' balancing loss if those have a coefficient.
        objective: the update's.
    """
    args, updated, policy_log_probs = objective.args, weights.updated, log_probs.view_as(log_probs)
    loss, logged = pass_policy_loss(objective.policy_loss, batch, weights, policy_log_probs)
    # Upstream's penalties, of the same tokens: the KL to the reference, the experts' balance, the entropy.
    if args.algo.kl.use_loss:
        kl, difference = _kl(args, log_probs, batch)
        mean_kl = aggregate_loss(kl, updated, **batch.denominators)
        loss = loss + mean_kl * objective.kl_ctl
        logged |= {"kl": mean_kl, "logprobs_diff": (difference * updated).sum() / updated.sum().clamp(min=1)}
    if objective.aux_loss_coef:
        loss = loss + output.aux_loss * objective.aux_loss_coef * batch.share
    if args.actor.entropy_coef is not None:
        entropy = aggregate_loss(output.entropy[:, -updated.shape[1] :], updated, **batch.denominators)
        logged["entropy_loss"] = entropy
        if args.actor.entropy_coef != 0:
            loss = loss - entropy * args.actor.entropy_coef
    return MicroBatchLoss(loss, logged, policy_log_probs)


def _kl(args: SimpleNamespace, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return upstream's estimate of the KL to the reference, and log π_θ − log π_ref, (B, A) each."""
    if args.algo.kl.init_coef <= 0:  # there is no reference
        return torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    kl = compute_approx_kl(
        log_probs,
        batch.base_action_log_probs,
        log_probs_old=batch.action_log_probs,
        kl_estimator=args.algo.kl.estimator,
        unbiased_gradient=args.algo.kl.unbiased_gradient,
    )
    return kl, log_probs.detach().float() - batch.base_action_log_probs.float()


def token_updates(
    result: MicroBatchLoss,
    batch: MicroBatch,
    weights: PassWeights,
    log_probs: Tensor,
    distributions: tuple[Tensor, Tensor],
) -> TokenUpdates:
    """Return what the loss of a micro-batch does to the tokens that the pass updates.

    It takes derivatives by the log-probs, through the loss function only. The graph of the model stays as it is, so
    the gradients of the backward pass that follows are the same bit for bit.

    Args:
        result: of `micro_batch_loss`, whose arguments these are.
        distributions: (B, A) entropies and (B, A) Σ_{j≠o} P_j².
    """
    whole, policy = torch.autograd.grad(result.loss, [log_probs, result.policy_log_probs], retain_graph=True)
    # The loss is a mean over the optimizer step's tokens, times the ranks. Weights are in units of a token's own loss.
    num_tokens = batch.denominators["batch_num_tokens"] / batch.denominators["dp_size"]
    factors, is_computed = weights.factors.clamp(min=torch.finfo(torch.float32).tiny), batch.selected.bool()
    entropies, squared_rest = distributions
    tokens = TokenUpdates(
        old_log_probs=batch.action_log_probs,
        log_probs=log_probs.detach(),
        advantages=batch.advantages,
        weights=whole * num_tokens,
        unweighted=(whole - policy + policy / factors) * num_tokens,
        is_clipped=is_computed & (batch.advantages != 0) & (policy == 0),
        is_computed=is_computed,
        entropies=entropies,
        squared_rest=squared_rest,
    )
    return TokenUpdates(*(values.flatten()[weights.places] for values in tokens))
