"""Ask what one update would do to every token: take it, look at the log-probs, undo it."""

from collections.abc import Sequence

from torch import Tensor

from arlopti_openrlhf.lab.analysis.policy import Policy
from arlopti_openrlhf.lab.analysis.rollouts import Batch


def log_probs_after_update(
    policy: Policy,
    batch: Batch,
    old_log_probs: Tensor,
    advantages: Tensor,
    stages: Sequence[Tensor],
    learning_rate: float,
    moments: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return (B, A) log π after one update, which takes one optimizer step per stage. Then undo the update.

    Args:
        policy: the policy, at the weights that the batch was sampled from.
        batch: the rollouts.
        old_log_probs: (B, A) log π_old.
        advantages: (B, A), reweighted or not.
        stages: the (B, A) mask of each stage's tokens, in the order of the steps.
        learning_rate: of every step.
        moments: AdamW's second moments. The default is those of a training that always makes this update: the mean
            over its stages.
    """
    if moments is None:
        # Of all stages at the start. The first one last, since its gradient is the first step's.
        own_moments = policy.zeros()
        for stage in reversed(stages):
            gradient = policy.gradient(batch, old_log_probs, advantages, stage, own_moments)
        moments = [moment.div_(len(stages)) for moment in own_moments]
    else:
        gradient = policy.gradient(batch, old_log_probs, advantages, stages[0])
    policy.step(gradient, moments, learning_rate)
    # Every further stage sees the weights that the one before has moved.
    for stage in stages[1:]:
        policy.step(policy.gradient(batch, old_log_probs, advantages, stage), moments, learning_rate)
    log_probs = policy.log_probs(batch)
    policy.restore()
    return log_probs


def learning_rate_of(
    policy: Policy,
    batch: Batch,
    old_log_probs: Tensor,
    gradient: Sequence[Tensor],
    moments: Sequence[Tensor],
    change: float,
) -> float:
    """Find the learning rate at which one step along `gradient` changes the response tokens' log π by `change`.

    Args:
        policy: the policy.
        batch: the rollouts.
        old_log_probs: (B, A) log π before the step.
        gradient: one per parameter.
        moments: AdamW's second moments, one per parameter.
        change: the root mean square over the tokens.
    """
    # The first guess moves the weights by 1e-4 of their own norm.
    size = sum(policy.direction(g, v).square().sum().item() for g, v in zip(gradient, moments, strict=True))
    weights = sum(p.detach().square().sum().item() for p in policy.parameters)
    learning_rate = 1e-4 * (weights / size) ** 0.5
    # Twice, as the change is linear in the step only near the one that is wanted.
    for _ in range(2):
        policy.step(gradient, moments, learning_rate)
        moved = (policy.log_probs(batch) - old_log_probs)[batch.action_mask].square().mean().sqrt().item()
        policy.restore()
        learning_rate *= change / moved
    return learning_rate
