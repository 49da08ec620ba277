"""Watches the figures of each step for what a run does not recover from by itself."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

_ROLLOUT_GAP = 0.1  # nats per token between vLLM's and the actor's log-probs, on average
_GRAD_NORM_FACTOR = 10  # times the median
_STEPS = 100  # of the median
_FEWEST_STEPS = 10  # that a median is taken of
# A step is bad if one of these is not finite, whatever stands before it, as in `lopti/low/policy_loss`.
_LOSSES = ("policy_loss", "critic_loss", "kl", "entropy_loss", "ppo_kl")


class Alarms:
    """Compares each step's figures with the limits. It knows the steps since the process began.

    Args:
        args: the nested arguments.
    """

    flat_reward_steps = 20  # in a row without a reward above the lowest one

    def __init__(self, args: Any) -> None:
        self.penalty: float | None = args.reward.stop_properly_penalty_coef
        # vLLM's log-probs, if importance sampling asks for them, are those among the tokens that top_p leaves.
        is_corrected = args.algo.advantage.is_correction_level != "off"
        self.top_p: float = args.rollout.top_p if is_corrected else 1.0
        self._active: set[str] = set()
        self._lowest_reward = math.inf
        self._flat_steps = 0
        self._gap = 0.0  # the last one measured: a small rollout batch may have none
        self._norms: dict[str, deque[float]] = {}  # by the metric's name: Lopti's stages each have their own

    def check(self, status: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Check the figures of a step.

        Args:
            status: the step's metrics. An alarm without its figure is silent.

        Returns:
            `alarm/<name>`, 0 or 1, of all alarms; and a line for each that begins or ends with this step.
        """
        self._gap = status.get("rollout/gap", self._gap)
        skipped = status.get("skipped_optimizer_steps", 0)
        # Each condition says what is good, so a figure that is NaN is an alarm.
        causes = {
            "skipped_steps": skipped
            and f"{skipped} optimizer steps were refused, for a loss or gradient that is not finite",
            "zero_advantages": not status.get("rollout/zero_advantage_groups", 0.0) < 1
            and "no sample of the rollout batch has an advantage, so nothing is learned from it",
            "flat_reward": self._flat_reward(status),
            "rollout_gap": not self._gap <= _ROLLOUT_GAP
            and f"the log-probs of vLLM and of the actor differ by {self._gap:.3g} nats per token on average, "
            f"more than {_ROLLOUT_GAP:g}{self._of_top_p()}",
            "grad_norm": self._grad_norm(status),
            "penalty": self._penalty(status.get("rollout/reward_min", 0.0)),
            "truncated": not status.get("rollout/truncated_rate", 0.0) < 1
            and "every response was cut off at its greatest length",
        }
        active = {name for name, cause in causes.items() if cause}
        lines = [f"alarm {name}: {causes[name]}" for name in causes if name in active - self._active]
        lines += [f"alarm {name} is over" for name in causes if name in self._active - active]
        self._active = active
        return {f"alarm/{name}": float(name in active) for name in causes}, lines

    def _flat_reward(self, status: Mapping[str, float]) -> str | None:
        if "rollout/reward_max" not in status:
            return None
        self._lowest_reward = min(self._lowest_reward, status["rollout/reward_min"])
        is_flat = status["rollout/reward_max"] <= self._lowest_reward
        self._flat_steps = self._flat_steps + 1 if is_flat else 0
        if self._flat_steps < self.flat_reward_steps:
            return None
        return f"{self._flat_steps} steps in a row without a reward above the lowest one, {self._lowest_reward:g}"

    def _of_top_p(self) -> str:
        if self.top_p == 1:
            return ""
        return f"; --rollout.top_p {self.top_p:g} alone makes up to {-math.log(self.top_p):.3g} of it, so give 1"

    def _penalty(self, lowest: float) -> str | None:
        if self.penalty is None or not 0 <= self.penalty < 1 or lowest >= 0:
            return None
        flag = f"--reward.stop_properly_penalty_coef {self.penalty:g}"
        return f"a reward is {lowest:g}, and {flag} would raise it if its answer were cut off: give a negative one"

    def _grad_norm(self, status: Mapping[str, float]) -> str | None:
        cause = None
        for name, norm in status.items():
            # The norm of a refused step is NaN. It is 0 if nothing had an advantage.
            if not name.endswith("actor_grad_norm") or not math.isfinite(norm) or not norm:
                continue
            norms = self._norms.setdefault(name, deque(maxlen=_STEPS))
            median = statistics.median(norms) if len(norms) >= _FEWEST_STEPS else math.inf
            if norm > _GRAD_NORM_FACTOR * median:
                cause = f"{name} is {norm:.3g}, {norm / median:.3g} times its median over the last {len(norms)} steps"
            norms.append(norm)
        return cause


def what_is_bad(status: Mapping[str, float], counts_refusals: bool) -> str:
    """Return why a step is bad: a loss that is not finite, or a refused optimizer step. Empty if the step is good.

    Args:
        status: the step's metrics.
        counts_refusals: whether a refused step alone is bad. In fp16 it is not: so DeepSpeed finds its loss scale.
    """
    causes = [
        f"{name} is {value}"
        for name, value in status.items()
        if name.rpartition("/")[2] in _LOSSES and not math.isfinite(value)
    ]
    # The norm of a step that is refused is NaN. The critic's refused steps are not counted otherwise.
    refused = status.get("skipped_optimizer_steps", 0) + math.isnan(status.get("critic_grad_norm", 0.0))
    if refused and (causes or counts_refusals):
        causes.append(f"{refused} optimizer steps refused")
    return ", ".join(causes)


def rollout_figures(experiences: Sequence[Experience], group_size: int) -> dict[str, float]:
    """Return the figures of a rollout batch that the alarms need, and upstream's statistics lack.

    Args:
        experiences: micro-batches of B samples, with their advantages (B, A). `index` (B,) is each sample's place in
            the rollout batch, where the samples of a prompt are neighbours.
        group_size: samples per prompt.

    Returns:
        The lowest and the highest reward, and the share of prompts with the advantage 0 in all samples throughout.
    """
    index = torch.tensor([place for experience in experiences for place in experience.index])
    rewards = torch.cat([experience.info["reward"] for experience in experiences]).float()
    has_advantage = torch.cat(
        [(experience.advantages * experience.action_mask).ne(0).any(dim=-1) for experience in experiences]
    )
    trained = set((index[has_advantage.to(index.device)] // group_size).tolist())
    groups = set((index // group_size).tolist())
    return {
        "rollout/reward_min": rewards.min().item(),
        "rollout/reward_max": rewards.max().item(),
        "rollout/zero_advantage_groups": 1 - len(trained) / len(groups),
    }
