"""Gives OpenRLHF the Knights-and-Knaves reward by path. `--reward.remote_url kk` is short for this file."""

from arlopti_openrlhf.grading.kk_reward import reward_func

__all__ = ["reward_func"]
