"""The math reward, for `--reward.remote_url rewards/math_reward.py`; `--reward.remote_url math` is the same."""

from arlopti_openrlhf.grading.math_reward import reward_func

__all__ = ["reward_func"]
