"""Reduces what an update logs, from micro-batches to passes, and from passes to the rollout batch."""

import math
from collections import defaultdict
from dataclasses import fields
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor

from arlopti_openrlhf.update.optimizer_steps import clip_factor
from arlopti_openrlhf.update.ranks import Ranks

# Sums over a pass's tokens, divided by the whole mini-batch's count: the passes' values add up to the update's.
ADDITIVE = ("policy_loss", "kl", "entropy_loss")
# They follow from π_old and vLLM's log-probs alone, so each pass has the same. They are weighted by response tokens.
OF_RESPONSES = ("vllm_kl", "is_filter_ratio")
_RESPONSE_TOKENS = "num_response_tokens"


def micro_batch_status(
    experience: Experience, means: dict[str, Tensor | None], num_tokens: int, num_response_tokens: int
) -> dict:
    """Return what upstream's `ActorPPOTrainer.training_step` does: metrics, and what each is a mean over.

    The learning rate and the norm of the gradient are not among them.

    Args:
        experience: the micro-batch. What its `info` holds is logged too, except under a name of `means`: OpenRLHF's
            experience maker puts zeros under `kl` where the KL is in the loss.
        means: scalars that are means over tokens; None is left out.
        num_tokens: the tokens that `means` are over, except for `OF_RESPONSES`.
        num_response_tokens: those of the responses.
    """
    metrics: dict = {name: value.detach() for name, value in means.items() if value is not None}
    weights: dict = {name: "response" if name in OF_RESPONSES else "token" for name in metrics}
    for name, value in experience.info.items():
        if isinstance(value, list):
            value = torch.tensor(value, dtype=torch.float)
        if isinstance(value, Tensor) and name not in means:
            metrics[name], weights[name] = value, "token" if value.dim() == 0 else "sample"
    for field in fields(Experience):
        value = getattr(experience, field.name)
        is_logged = Experience.is_episode_tensor_field(field.name) and field.name not in (
            "rewards",
            "scores",
            *metrics,
        )
        if is_logged and isinstance(value, Tensor):
            metrics[field.name], weights[field.name] = value, "sample"
    return {
        "metrics": metrics,
        "weights": weights,
        "num_samples": float(len(experience.action_mask)),
        # Upstream divides by the ranks' total, which a micro-batch without tokens would leave at 0.
        "num_action_tokens": max(num_tokens, 1e-9),
        _RESPONSE_TOKENS: max(num_response_tokens, 1e-9),
    }


class PassMetrics:
    """Sums the statuses of a pass's micro-batches, to be reduced over the ranks in one call.

    Args:
        divisor: by what DeepSpeed divides each loss, which upstream's denominators make up for. What is divided by the
            whole mini-batch's tokens already (`ADDITIVE`) is added up, not weighted by tokens.
    """

    def __init__(self, divisor: int) -> None:
        self.weights: dict[str, str] = {}
        self.sums: dict[str, Tensor] = {}
        self.totals = {"token": 0.0, "response": 0.0, "sample": 0.0, "step": float(divisor)}

    def add(self, status: dict) -> None:
        """Add what `training_step` returned."""
        counts = {"token": status["num_action_tokens"], "response": status[_RESPONSE_TOKENS]}
        counts |= {"sample": status["num_samples"], "step": 1.0}
        for name, value in status["metrics"].items():
            weight = status["weights"][name]
            self.weights[name] = "step" if weight == "token" and name in ADDITIVE else weight
            value = torch.as_tensor(value).double().mean() * counts[self.weights[name]]
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for weight in ("token", "response", "sample"):
            self.totals[weight] += counts[weight]

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Return the means over the micro-batches of all ranks."""
        names = sorted(self.sums)
        # The host waits once for those that are on the device.
        on_device = [name for name in names if self.sums[name].is_cuda]
        sums: dict[str, Any] = self.sums
        if on_device:
            sums = sums | dict(zip(on_device, torch.stack([sums[name] for name in on_device]).tolist(), strict=True))
        figures = torch.tensor([*(float(sums[name]) for name in names), *self.totals.values()], dtype=torch.float64)
        reduced = ranks.sum_tensor(figures).tolist()
        values, total = reduced[: len(names)], dict(zip(self.totals, reduced[len(names) :], strict=True))
        means = {n: v / total[self.weights[n]] for n, v in zip(names, values, strict=True)}
        return means | {_RESPONSE_TOKENS: total["response"]}


class UpdateMetrics:
    """Gathers the passes of a rollout batch into one status."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.passes: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
        # The metrics of a pass; the others are of its samples, and the same in every pass.
        self.of_pass = {"policy_loss", "entropy_loss", "ppo_clip_ratio", "ppo_kl"}
        self.of_pass |= {"kl", "logprobs_diff"} if args.algo.kl.use_loss else set()
        self.max_norm = args.actor.max_norm
        # GSPO's loss is the sequences', in every pass: it has no sum.
        self.summed = ADDITIVE[1:] if args.actor.policy_loss_type == "gspo" else ADDITIVE

    def add(self, label: str, num_tokens: float, status: dict[str, float]) -> None:
        """Add a pass: its name, the tokens that it updated over all ranks, and what `PassMetrics.reduce` returned.

        One without a token has taken no step: its metrics do not count, and what it adds to a sum is 0. Of each
        mini-batch all passes are added, in the same order of mini-batches.
        """
        self.passes[label].append((num_tokens, status))

    def summary(self) -> dict[str, float]:
        """Return the rollout batch's metrics.

        The metrics of a pass that has a name appear under it, as `lopti/low/<metric>` or
        `token_method/pass1/<metric>`. The additive ones also appear as the sum over all, and are means over the
        mini-batches that were trained in any pass. Means of a pass are weighted by tokens. The learning rate is the
        last pass's. So is, under each name, the norm of the gradient. `clip_factor` is the mean of what clipping
        multiplied the gradients by, without refused steps.
        """
        summary: dict[str, float] = {}
        # A mini-batch's samples are described by the last pass that was trained on them.
        trained = [[status for n, status in passes if n] for passes in zip(*self.passes.values(), strict=True)]
        described = [statuses[-1] for statuses in trained if statuses]
        for label, all_passes in self.passes.items():
            passes = [(num_tokens, status) for num_tokens, status in all_passes if num_tokens]
            total = sum(num_tokens for num_tokens, _ in passes)
            if label and passes:
                summary[f"{label}/num_tokens"] = total
            for name in sorted(set().union(*(status for _, status in passes)) - {_RESPONSE_TOKENS}):
                values = [(num_tokens, status.get(name, 0.0)) for num_tokens, status in passes]
                mean = sum(value for _, value in values) / (len(described) if name in self.summed else len(values))
                mean_by_tokens = sum(n * value for n, value in values) / total
                of_pass = f"{label}/{name}" if label else name
                if name == "actor_lr":
                    summary[name] = values[-1][1]
                elif name == "actor_grad_norm":
                    norms = [status[name] for _, status in passes if name in status]
                    summary[of_pass] = norms[-1]
                    if factors := [clip_factor(norm, self.max_norm) for norm in norms if 0 <= norm < math.inf]:
                        summary[of_pass.replace(name, "clip_factor")] = fmean(factors)
                elif name not in self.of_pass:
                    counts = [status.get(_RESPONSE_TOKENS, 1) if name in OF_RESPONSES else 1 for status in described]
                    of_all = sum(n * status.get(name, 0.0) for n, status in zip(counts, described, strict=True))
                    summary[name] = of_all / sum(counts)
                elif not label:
                    summary[name] = mean_by_tokens
                else:
                    if name in self.summed:
                        summary[name] = summary.get(name, 0.0) + mean
                    summary[of_pass] = mean if name in ADDITIVE else mean_by_tokens
        return summary
