"""The life of a micro-batch, from its tokens to its loss (docs/architecture.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.group_loss import group_policy_loss
from arlopti_openrlhf.update.penalties import add_penalties


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
    experience = batch.experience
    response, old, weights = experience.action_mask, experience.action_log_probs, batch.weights  # (B, A)

    # Which tokens are computed: those with a weight. Where π_old is not known yet, and for GSPO, whose ratio is the
    # sequence's, the whole response is. Idle responses have no gradient.
    group = response * batch.updated
    wanted = response if objective.args.actor.policy_loss_type == "gspo" else group
    selected = (wanted * ~batch.is_idle[:, None]).to(response.dtype)

    # Forward: log π_θ of the selected tokens, 0 elsewhere.
    log_probs, output = forward(experience, selected)

    # π_old and the weights, from this forward where they are not known yet. θ has not moved since the update began.
    if batch.gives_old_log_probs:
        old = old_log_probs.from_first_forward(log_probs, selected, old, response)
        weights, updated = weigh(old, output)
        group = response * updated

    # The loss, of the weighted advantages. The policy loss reads its own view of the log-probs, so the derivative by
    # that view holds no KL.
    policy_log_probs = log_probs.view_as(log_probs)
    policy = group_policy_loss(
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
    aux_loss_coef = objective.aux_loss_coef
    loss, penalties = add_penalties(
        policy.loss,
        log_probs,
        old,
        experience.base_action_log_probs,
        group=group,
        output=output,
        args=objective.args,
        kl_ctl=objective.kl_ctl,
        balancing=None if aux_loss_coef is None else (aux_loss_coef, batch.share),
        loss_batch_info=batch.denominators,
    )
    logged = policy.logged() | penalties
    return Result(loss, output, log_probs, policy_log_probs, old, weights, group, selected, logged)
