"""The Knights-and-Knaves reward, loaded by path: `--reward.remote_url rewards/kk_reward.py`, or `kk` for short."""

from arlopti_openrlhf.grading.kk_reward import reward_func

__all__ = ["reward_func"]
