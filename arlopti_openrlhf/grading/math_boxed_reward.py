"""Rewards math as `math_reward` does, but boxed answers alone, as the paper's authors graded their runs."""

from collections.abc import Sequence
from typing import Any

from arlopti_openrlhf.grading import math_reward
from arlopti_openrlhf.grading.math_reward import worker_pool as worker_pool


def reward_func(
    queries: Sequence[str], prompts: Sequence[str | None], labels: Sequence[object], **kwargs: Any
) -> dict[str, Any]:
    """Grade B samples as `math_reward.reward_func` does. An answer without a box earns 0."""
    answer = math_reward.reward_func(queries, prompts, labels)
    rewards = answer["rewards"] * answer["extra_logs"]["well_formed"]
    return answer | {"rewards": rewards, "scores": rewards.clone()}
