"""Adds the KL to the reference, the experts' balance and the entropy to a policy loss."""

from types import SimpleNamespace

import torch
from openrlhf.models import aggregate_loss
from openrlhf.models.utils import compute_approx_kl
from torch import Tensor
from transformers.utils import ModelOutput


def add_penalties(
    loss: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    base_log_probs: Tensor,
    *,
    group: Tensor,
    output: ModelOutput,
    args: SimpleNamespace,
    kl_ctl: float,
    balancing: tuple[float, float] | None,
    loss_batch_info: dict,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add upstream's penalties to the policy loss, restricted to a group of tokens.

    Args:
        loss: the policy loss.
        log_probs: (B, A) log π_θ, with graph.
        old_log_probs: (B, A) log π_old.
        base_log_probs: (B, A) log-probs of the reference; not read without a KL loss.
        group: (B, A), nonzero on the tokens that the pass updates.
        output: the model's output, with `entropy` (B, A) and `aux_loss` where they are asked for.
        args: upstream's nested arguments.
        kl_ctl: coefficient of the KL loss.
        balancing: coefficient of the experts' balancing loss and the micro-batch's share of it, or None.
        loss_batch_info: upstream's denominators (`get_loss_batch_info`).

    Returns:
        The whole loss, and `kl`, `logprobs_diff` and `entropy_loss` where they exist, for the log.
    """
    logged = {}
    if args.algo.kl.use_loss:
        kl = difference = torch.zeros_like(log_probs)
        if args.algo.kl.init_coef > 0:
            kl = compute_approx_kl(
                log_probs,
                base_log_probs,
                log_probs_old=old_log_probs,
                kl_estimator=args.algo.kl.estimator,
                unbiased_gradient=args.algo.kl.unbiased_gradient,
            )
            difference = log_probs.detach().float() - base_log_probs.float()
        logged["kl"] = aggregate_loss(kl, group, **loss_batch_info)
        logged["logprobs_diff"] = (difference * group).sum() / group.sum().clamp(min=1)
        loss = loss + logged["kl"] * kl_ctl
    if balancing is not None:
        coefficient, share = balancing
        loss = loss + output.aux_loss * coefficient * share
    if args.actor.entropy_coef is not None:
        entropies = output.entropy[:, -group.shape[1] :]
        logged["entropy_loss"] = aggregate_loss(entropies, group, **loss_batch_info)
        if args.actor.entropy_coef != 0:
            loss = loss - logged["entropy_loss"] * args.actor.entropy_coef
    return loss, logged
