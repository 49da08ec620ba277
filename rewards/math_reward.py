"""Gives OpenRLHF the math reward by path. `--reward.remote_url math` is short for this file."""

from arlopti_openrlhf.grading.math_reward import reward_func

__all__ = ["reward_func"]
