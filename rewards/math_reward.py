"""The math reward, loaded by path: `--reward.remote_url rewards/math_reward.py`, or `math` for short."""

from arlopti_openrlhf.grading.math_reward import reward_func

__all__ = ["reward_func"]
