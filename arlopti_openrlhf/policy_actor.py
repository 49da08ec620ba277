"""Where the paper's maths meets OpenRLHF: the actor trainer with AR and the two-stage update of Lopti.

A pass updates exactly the tokens that its action mask selects. Lopti hands upstream's `training_step` a mask narrowed
to one group; everything else is upstream's.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import deepspeed
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.logging_utils import init_logger
from torch import distributed as dist
from torch import nn

from arlopti_openrlhf.token_update import (
    HIGH,
    LOW,
    group_mask,
    probability_quantile,
    reweight_advantages,
    token_probabilities,
)

logger = init_logger(__name__)

# Sums over a group's tokens, divided by the whole mini-batch's count: the stages' values add up to the update's.
ADDITIVE_METRICS = ("policy_loss", "kl", "entropy_loss")


def install() -> None:
    """Makes OpenRLHF's policy actors train with `TokenUpdateTrainer`. Called on the driver, before the CLI runs.

    Ray pickles `PolicyModelActor` by value, with the globals of its module as they are on the driver: rebinding the
    one name there reaches every worker, and needs no second actor class.
    """
    ppo_actor.ActorPPOTrainer = TokenUpdateTrainer


class Stage(NamedTuple):
    """What one pass of Lopti updates."""

    group: str  # LOW or HIGH
    eta: float  # the threshold on π_old that divides the groups


class GroupPolicyLoss(nn.Module):
    """Upstream's `PolicyLoss`, with the gradient of one group's tokens alone.

    The only change: the loss is taken over the whole response, with the tokens outside the group held constant. So
    every denominator and every sequence-level statistic (seq-mean-token-mean, GSPO's ratio, the importance-sampling
    gate) stays that of the response, and at one θ the groups' gradients add up to the whole gradient.

    Args:
        policy_loss: upstream's loss.

    Attributes:
        response_mask: (B, A) of the current micro-batch; None outside a stage.
        response_log_probs: (B, A) current log π of the whole response, with graph; filled where a sequence-level ratio
            needs it (GSPO), else None.
    """

    def __init__(self, policy_loss: nn.Module) -> None:
        super().__init__()
        self.policy_loss = policy_loss
        self.response_mask: torch.Tensor | None = None
        self.response_log_probs: torch.Tensor | None = None

    def forward(self, log_probs, old_log_probs, advantages, action_mask, **kwargs):
        """Upstream's arguments, all (B, A), with the group's mask as `action_mask`; upstream's five results.

        The clip ratio and ppo_kl are means over the group's tokens; for GSPO over the response, whose ratio is shared.
        """
        group = action_mask.bool()
        if self.response_log_probs is not None:
            log_probs = torch.where(group, self.response_log_probs, self.response_log_probs.detach())
            return self.policy_loss(log_probs, old_log_probs, advantages, action_mask=self.response_mask, **kwargs)
        # Outside the group ratio 1 and advantage 0: neither value nor gradient.
        loss, clip_ratio, ppo_kl, *rollout_gap = self.policy_loss(
            torch.where(group, log_probs, old_log_probs),
            old_log_probs,
            advantages * group,
            action_mask=self.response_mask,
            **kwargs,
        )
        per_group_token = self.response_mask.sum() / group.sum().clamp(min=1)
        return loss, clip_ratio * per_group_token, ppo_kl * per_group_token, *rollout_gap


class TokenUpdateTrainer(ppo_actor.ActorPPOTrainer):
    """`ActorPPOTrainer` with Advantage Reweighting (Eq. 4) and Lopti (Algorithm 1, lines 11-19).

    The only changes to upstream:
    1. AR scales the advantages of each micro-batch by the sampling policy's probabilities.
    2. With Lopti, a rollout batch is trained as a series of (mini-batch, group) passes. Each is upstream's own
       `ppo_train` on the samples of one mini-batch, that is of one optimizer step, with the action mask narrowed to
       the group. A group that is empty on every rank is passed over.
    3. Two steps are taken where upstream takes one, so the learning-rate schedule is stretched over twice the steps,
       and EMA and the MoE loss, which count steps, are shared out between the two.
    4. LoRA's weights are merged before they are sent to vLLM.
    With AR and Lopti off, upstream's code runs unchanged.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = self.args.algo.ar.alpha
        self.lopti = self.args.algo.lopti
        self.stage: Stage | None = None
        if not self._uses_lopti():
            return
        self.actor_loss_fn = GroupPolicyLoss(self.actor_loss_fn)
        if self.args.actor.policy_loss_type == "gspo":
            self.actor.register_forward_pre_hook(self._forward_whole_response, with_kwargs=True)
            self.actor.register_forward_hook(self._keep_response_log_probs)
        stages = len(self._groups())
        _stretch_schedule(self.actor_scheduler, stages)
        self.ema_beta **= 1 / stages
        self.args.actor.aux_loss_coef /= stages

    def _uses_lopti(self) -> bool:
        return self.lopti.eta is not None or self.lopti.quantile is not None

    def _groups(self) -> tuple[str, ...]:
        if self.lopti.groups != "both":
            return (self.lopti.groups,)
        return (LOW, HIGH) if self.lopti.order == "low_first" else (HIGH, LOW)

    # --- the update ------------------------------------------------------------------------------------------

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Trains on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. With Lopti those that a pass computes appear per stage, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of both (not GSPO's loss, which
            is the sequences' in both). With AR `ar/mean_weight`, with Lopti `lopti/low_share` and `lopti/eta`.
        """
        if not self.alpha and not self._uses_lopti():
            return super().ppo_train(kl_ctl)
        eta = self._threshold() if self._uses_lopti() else None
        token_metrics = self._token_metrics(eta)
        status = super().ppo_train(kl_ctl) if eta is None else self._train_in_stages(kl_ctl, eta)
        return status | token_metrics

    def _train_in_stages(self, kl_ctl: float, eta: float) -> dict[str, float]:
        stages = [Stage(group, eta) for group in self._groups()]
        items, max_epochs = self.replay_buffer.items, self.max_epochs
        metrics = _StageMetrics()
        self.max_epochs = 1
        try:
            for _ in range(max_epochs):
                mini_batches = list(self._mini_batches(items))
                if self.lopti.scope == "batch":
                    passes = [(mini_batch, stage) for stage in stages for mini_batch in mini_batches]
                else:
                    passes = [(mini_batch, stage) for mini_batch in mini_batches for stage in stages]
                for mini_batch, stage in passes:
                    num_tokens = self._count_over_ranks(mini_batch, stage)
                    if not num_tokens:
                        # The schedule counts data: it moves on where no step is taken.
                        self.actor_scheduler.step()
                        continue
                    self.replay_buffer.items, self.stage = mini_batch, stage
                    metrics.add(stage.group, num_tokens, super().ppo_train(kl_ctl))
        finally:
            self.replay_buffer.items, self.stage, self.max_epochs = items, None, max_epochs
            self.actor_loss_fn.response_mask = self.actor_loss_fn.response_log_probs = None
        return metrics.summary(self.args)

    def _mini_batches(self, items: list[Experience]) -> Iterator[list[Experience]]:
        """This rank's samples of each optimizer step of one epoch, in upstream's order (`ppo_train`, its DataLoader).

        Only whole mini-batches, as many on every rank: of a short last rollout batch upstream would carry gradients
        over into the next update, which here would be another group's.
        """
        sharded = self.strategy.ring_attn_group is not None or self.args.ds.tensor_parallel_size > 1
        if not sharded and not self.args.train.dynamic_batch_enable:
            items = [items[i] for i in torch.randperm(len(items)).tolist()]
        dp_size = self.strategy.ds_device_mesh["dp"].size()
        size = self.args.train.batch_size // dp_size
        count = -int(self.strategy.all_reduce(-float(len(items) // size), op="max"))
        if count * size < len(items):
            logger.info(f"Lopti: {len(items) - count * size} samples do not fill a mini-batch of {size}: left out")
        for i in range(count):
            yield items[i * size : (i + 1) * size]

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None
    ) -> dict[str, object]:
        """Upstream's step on one micro-batch, with reweighted advantages and, in a stage, the group's action mask."""
        if self.alpha:
            experience.advantages = reweight_advantages(experience.advantages, experience.action_log_probs, self.alpha)
        if self.stage is None:
            return super().training_step(experience, kl_ctl, step, loss_batch_info)

        response_mask = experience.action_mask
        group = group_mask(self.stage.group, experience.action_log_probs, response_mask, self.stage.eta)
        self.actor_loss_fn.response_mask = response_mask
        experience.action_mask = group.to(response_mask.dtype)
        status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        return self._without_empty_means(status)

    def _without_empty_means(self, status: dict) -> dict:
        """A micro-batch without tokens of the group has means of nothing: they count as 0, with next to no weight."""
        metrics, weights = status["metrics"], status["weights"]
        for name, value in metrics.items():
            if weights[name] == "token" and isinstance(value, torch.Tensor):
                metrics[name] = value.nan_to_num(nan=0.0) if not status["num_action_tokens"] else value
            if name in ADDITIVE_METRICS:
                # Already divided by the mini-batch's token count: each micro-batch counts once.
                weights[name] = "sample"
        # Upstream divides by the ranks' total, which a micro-batch can leave at 0.
        status["num_action_tokens"] = max(status["num_action_tokens"], 1e-9)
        return status

    # --- GSPO: the ratio is the sequence's, so the whole response is forwarded -------------------------------

    def _forward_whole_response(self, actor: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.stage is None:
            return None
        sequences, _, *rest = args
        return (sequences, self.actor_loss_fn.response_mask, *rest), kwargs

    def _keep_response_log_probs(self, actor: nn.Module, args: tuple, output) -> None:
        if self.stage is not None:
            self.actor_loss_fn.response_log_probs = output[0]

    # --- the tokens of a rollout batch, over all ranks -------------------------------------------------------

    def _response_log_probs(self, items: list[Experience]) -> torch.Tensor:
        """log π_old of this rank's response tokens, as one row (1, tokens)."""
        log_probs = [item.action_log_probs[item.action_mask.bool()] for item in items]
        return torch.cat(log_probs)[None] if log_probs else torch.empty(1, 0)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(total, group=self.strategy.ds_device_mesh["dp"].get_group())
        return total.tolist()

    def _count_over_ranks(self, items: list[Experience], stage: Stage) -> float:
        log_probs = self._response_log_probs(items)
        mask = group_mask(stage.group, log_probs, torch.ones_like(log_probs), stage.eta)
        return self._sum_over_ranks(mask.sum().item())[0]

    def _threshold(self) -> float:
        """η: as given, or the quantile of the whole rollout batch, over all ranks."""
        if self.lopti.eta is not None:
            return self.lopti.eta
        log_probs = self._response_log_probs(self.replay_buffer.items)
        gathered: list = [None] * self.strategy.ds_device_mesh["dp"].size()
        dist.all_gather_object(gathered, log_probs, group=self.strategy.ds_device_mesh["dp"].get_group())
        log_probs = torch.cat(gathered, dim=1)
        # Without a token there are no groups to divide, and any threshold will do.
        return (
            probability_quantile(log_probs, torch.ones_like(log_probs), self.lopti.quantile)
            if log_probs.numel()
            else 1.0
        )

    def _token_metrics(self, eta: float | None) -> dict[str, float]:
        log_probs = self._response_log_probs(self.replay_buffer.items)
        probabilities = token_probabilities(log_probs)
        low = (probabilities < eta).sum().item() if eta is not None else 0
        tokens, low, mass = self._sum_over_ranks(log_probs.numel(), low, probabilities.double().sum().item())
        tokens = max(tokens, 1)
        metrics = {"ar/mean_weight": self.alpha * mass / tokens + 1 - self.alpha} if self.alpha else {}
        if eta is not None:
            metrics |= {"lopti/low_share": low / tokens, "lopti/eta": eta}
        return metrics

    # --- LoRA ------------------------------------------------------------------------------------------------

    def broadcast_to_vllm(self) -> None:
        """Upstream's weight sync; a LoRA model is sent merged, under its base model's parameter names.

        Upstream sends PEFT's names, which vLLM does not know. Merging takes a copy of the adapted weights during the
        sync, on the actor's device.
        """
        if not self.args.ds.lora.rank:
            return super().broadcast_to_vllm()
        with _merged_parameters(self.actor.model.module, gathered=self.args.ds.zero_stage == 3):
            super().broadcast_to_vllm()


class _StageMetrics:
    """Gathers what upstream's `ppo_train` returns per pass into one status per rollout batch."""

    def __init__(self) -> None:
        self.passes: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)

    def add(self, group: str, num_tokens: float, status: dict[str, float]) -> None:
        self.passes[group].append((num_tokens, status))

    def summary(self, args) -> dict[str, float]:
        """Means over the passes: of a pass's own metrics by stage, weighted by tokens; of the samples' overall."""
        of_pass = {"policy_loss", "entropy_loss", "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"}
        of_pass |= {"actor_grad_norm"} | ({"kl", "logprobs_diff"} if args.algo.kl.use_loss else set())
        # GSPO's loss is the sequences', in both stages: it has no sum.
        summed = ADDITIVE_METRICS[1:] if args.actor.policy_loss_type == "gspo" else ADDITIVE_METRICS
        summary: dict[str, float] = {}
        for group, passes in self.passes.items():
            statuses = [status for _, status in passes]
            total = sum(num_tokens for num_tokens, _ in passes)
            summary[f"lopti/{group}/num_tokens"] = total
            for name in set().union(*statuses):
                mean = sum(status.get(name, 0.0) for status in statuses) / len(statuses)
                if name not in of_pass:
                    # `actor_lr` moves from pass to pass; the samples' metrics are the same in both stages.
                    summary[name] = statuses[-1][name] if name == "actor_lr" else mean
                    continue
                if name in summed:
                    summary[name] = summary.get(name, 0.0) + mean
                if name not in ADDITIVE_METRICS:
                    mean = sum(n * status.get(name, 0.0) for n, status in passes) / total
                summary[f"lopti/{group}/{name}"] = mean
        return summary


def _stretch_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, stages: int) -> None:
    """Spans the schedule over `stages` times the steps: at equal data the learning rate is the same."""
    scheduler.lr_lambdas = [lambda step, curve=curve: curve(step / stages) for curve in scheduler.lr_lambdas]


@contextmanager
def _merged_parameters(model: nn.Module, gathered: bool) -> Iterator[None]:
    """Makes `model.named_parameters()` of a PEFT LoRA model those of its merged base model, for upstream's sync loop.

    Args:
        model: PEFT model with LoRA layers.
        gathered: under ZeRO-3, gather each partitioned weight first (a collective call on every rank).
    """
    prefix, merged = "base_model.model.", []
    lora_layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in type(model).named_parameters(model):
        layer_name, is_base, suffix = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        layer = lora_layers.get(layer_name) if is_base and suffix == "weight" else None
        with deepspeed.zero.GatheredParameters(
            [parameter, *(layer.parameters() if layer is not None else ())], enabled=gathered
        ):
            weight = parameter.data.clone() if layer is not None or gathered else parameter.data
            for adapter in layer.active_adapters if layer is not None else ():
                weight += layer.get_delta_weight(adapter).to(weight)
        merged_parameter = nn.Parameter(weight, requires_grad=False)
        merged_parameter.ds_shape = weight.shape  # what upstream reads under ZeRO-3
        merged.append((name.removeprefix(prefix).replace(".base_layer.", "."), merged_parameter))
    model.named_parameters = lambda: iter(merged)
    try:
        yield
    finally:
        del model.named_parameters
