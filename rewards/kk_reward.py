"""The Knights-and-Knaves reward, for `--reward.remote_url rewards/kk_reward.py`; `--reward.remote_url kk` is the same."""

from arlopti_openrlhf.grading.kk_reward import reward_func

__all__ = ["reward_func"]
