"""Counts the steps in a row that went wrong, and stops the run after too many."""

import math
from collections.abc import Mapping

# What a step is bad by if it is not finite, whatever stands before it, as in `lopti/low/policy_loss`.
_LOSSES = ("policy_loss", "critic_loss", "kl", "entropy_loss", "ppo_kl")


class BadSteps:
    """Counts bad steps in a row: those with a refused optimizer step, or with a loss that is not finite.

    Args:
        most: `--train.max_bad_steps`, after which the run is to stop.
        counts_refusals: whether a refused step alone is bad. In fp16 it is not, because DeepSpeed finds its loss scale
            by refusing steps.
    """

    def __init__(self, most: int, counts_refusals: bool) -> None:
        self.most, self.counts_refusals = most, counts_refusals
        self.causes: list[str] = []  # of each bad step in a row

    def add(self, step: int, status: Mapping[str, float]) -> str | None:
        """Add a step by its metrics. Return what was bad about it, or None."""
        wrong = [
            f"{name} is {value}"
            for name, value in status.items()
            if name.rpartition("/")[2] in _LOSSES and not math.isfinite(value)
        ]
        refused = status.get("skipped_optimizer_steps", 0)
        if refused and (wrong or self.counts_refusals):
            wrong.append(f"{refused} optimizer steps refused")
        self.causes = [*self.causes, f"step {step}: {', '.join(wrong)}"] if wrong else []
        return self.causes[-1] if wrong else None

    @property
    def is_bad(self) -> bool:
        """Whether the last step was bad."""
        return bool(self.causes)

    @property
    def are_too_many(self) -> bool:
        """Whether the run is to stop."""
        return len(self.causes) >= self.most
