"""OpenRLHF's policy loss with the gradient of one group of tokens."""

from typing import NamedTuple

import torch
from openrlhf.models import PolicyLoss
from torch import Tensor


class PolicyLossTerms(NamedTuple):
    """What upstream's `PolicyLoss` returns, scalars. The last two are None without importance-sampling correction."""

    loss: Tensor
    clip_ratio: Tensor
    ppo_kl: Tensor
    vllm_kl: Tensor | None
    is_filter_ratio: Tensor | None

    def logged(self) -> dict[str, Tensor | None]:
        """Return the terms under the names by which upstream logs them."""
        values = self._asdict()
        return {"policy_loss": values.pop("loss"), "ppo_clip_ratio": values.pop("clip_ratio")} | values


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
) -> PolicyLossTerms:
    """Take upstream's loss over the whole response, with the gradient of the selected tokens of `group` alone.

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
        Upstream's five terms. The clip ratio and ppo_kl are means over the tokens of `group`; those that were not
        selected count as unmoved. For GSPO, whose ratio is the sequence's, they are means over the response. A mean
        over no tokens is 0.
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

    return PolicyLossTerms(loss, mean(clip_ratio, scale), mean(ppo_kl, scale), mean(vllm_kl), mean(is_filter_ratio))
