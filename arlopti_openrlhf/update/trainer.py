"""Where the paper's maths meets OpenRLHF: the actor trainer with AR and the two-stage update of Lopti.

A pass updates exactly the tokens that its action mask selects. Lopti hands upstream's `training_step` a mask narrowed
to one group, and the selective actor computes what the mask selects; everything else is upstream's.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import deepspeed
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ray import launcher, ppo_actor
from openrlhf.utils.logging_utils import init_logger
from torch import distributed as dist
from torch import nn

from arlopti_openrlhf.forward.lm_head import distribution_statistics
from arlopti_openrlhf.forward.selective_actor import SelectiveActor, replaced_attribute
from arlopti_openrlhf.token_update import (
    HIGH,
    LOW,
    advantage_weights,
    group_mask,
    probability_quantile,
    reweight_advantages,
    token_probabilities,
)
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS, TokenUpdates, UpdateStatistics

logger = init_logger(__name__)

# Sums over a group's tokens, divided by the whole mini-batch's count: the stages' values add up to the update's.
ADDITIVE_METRICS = ("policy_loss", "kl", "entropy_loss")


def install(selective: bool = True) -> None:
    """Makes OpenRLHF's policy actors train with `TokenUpdateTrainer`. Called on the driver, before Ray starts.

    Ray pickles `PolicyModelActor` by value, with the globals of its module as they are on the driver: rebinding
    names there reaches every worker, and needs no second actor class.

    Args:
        selective: whether policy and reference are `SelectiveActor`s; else upstream's.
    """
    ppo_actor.ActorPPOTrainer = TokenUpdateTrainer
    if selective:
        ppo_actor.Actor = launcher.Actor = SelectiveActor


class Stage(NamedTuple):
    """What one pass of Lopti updates."""

    group: str  # LOW or HIGH
    eta: float  # the threshold on π_old that divides the groups


class GroupPolicyLoss(nn.Module):
    """Upstream's `PolicyLoss`, with the gradient of the selected tokens alone.

    The only change: the loss is taken over the whole response, with the other tokens held constant. So every
    denominator and every sequence-level statistic (seq-mean-token-mean, GSPO's ratio, the importance-sampling gate)
    stays that of the response, and at one θ the groups' gradients add up to the whole gradient.

    Args:
        policy_loss: upstream's loss.

    Attributes:
        response_mask: (B, A) of the current micro-batch.
        response_log_probs: (B, A) current log π of the whole response, with graph; filled where a sequence-level ratio
            needs it (GSPO in a stage), else None.
        num_tokens: over how many tokens the clip ratio and ppo_kl are means: those of the stage's group, or all.
            What is not selected counts as unmoved.
    """

    def __init__(self, policy_loss: nn.Module) -> None:
        super().__init__()
        self.policy_loss = policy_loss
        self.response_mask: torch.Tensor | None = None
        self.response_log_probs: torch.Tensor | None = None
        self.num_tokens: torch.Tensor | None = None

    def forward(self, log_probs, old_log_probs, advantages, action_mask, **kwargs):
        """Upstream's arguments, all (B, A), with the selected tokens' mask as `action_mask`; upstream's five results.

        For GSPO the clip ratio and ppo_kl are the response's, whose ratio its tokens share.
        """
        selected = action_mask.bool()
        if self.response_log_probs is not None:
            log_probs = torch.where(selected, self.response_log_probs, self.response_log_probs.detach())
            return self.policy_loss(log_probs, old_log_probs, advantages, action_mask=self.response_mask, **kwargs)
        # Of the others ratio 1 and advantage 0: neither value nor gradient.
        loss, clip_ratio, ppo_kl, *rollout_gap = self.policy_loss(
            torch.where(selected, log_probs, old_log_probs),
            old_log_probs,
            advantages * selected,
            action_mask=self.response_mask,
            **kwargs,
        )
        scale = self.response_mask.sum() / self.num_tokens.clamp(min=1)
        return loss, clip_ratio * scale, ppo_kl * scale, *rollout_gap


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
    With upstream's actor, and AR and Lopti off, upstream's code runs unchanged. With a `SelectiveActor`, at equal
    gradients:
    5. The samples of a prompt are kept together when the rollout batch is shuffled into mini-batches, so that they
       share its computation.
    6. The first pass over a rollout batch is on-policy: its own forward gives the old log-probs, where nothing needs
       them earlier. Those of the other mini-batches are computed just before it.
    7. Responses without advantage are not computed, where there is no KL or entropy term. In the metrics they count as
       unmoved by the update.
    In both cases:
    8. Statistics of the tokens by probability are taken from the tensors of each micro-batch (`_UpdateObserver`).
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = self.args.algo.ar.alpha
        self.lopti = self.args.algo.lopti
        self.stage: Stage | None = None
        self.selective = isinstance(self.actor, SelectiveActor)
        self.skips_idle = self.selective and not self.args.algo.kl.use_loss and self.args.actor.entropy_coef is None
        self.on_policy: _OnPolicyPass | None = None
        self.idle_steps = 0  # which the engine counts, though it did not take them
        self.defers_log_probs = self.selective and self._can_defer_log_probs()
        if self.selective:
            self.actor.defers_log_probs = self.defers_log_probs
            self.actor.register_forward_hook(self._take_old_log_probs)
        self.replay_buffer.collate_fn = self._collate
        if self._uses_lopti() or self.skips_idle:
            self.actor_loss_fn = GroupPolicyLoss(self.actor_loss_fn)
        self.observer = _UpdateObserver(self) if self.args.logger.probability_stats != "off" else None
        if not self._uses_lopti():
            return
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

    def _can_defer_log_probs(self) -> bool:
        """Whether nothing needs old log-probs before the update, and the first pass's forward gives them exactly."""
        in_the_reward = self.args.algo.kl.init_coef > 0 and not self.args.algo.kl.use_loss
        random = any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.actor.modules()) or any(
            isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
            for name, value in self.actor.hf_config.to_dict().items()
        )
        balancing_loss = self.aux_loss and self._uses_lopti()  # an empty group would have a gradient
        in_advance = in_the_reward or self.lopti.quantile is not None
        return not (in_advance or random or balancing_loss or self.actor.is_vlm)

    # --- the update ------------------------------------------------------------------------------------------

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Trains on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. With Lopti those that a pass computes appear per stage, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of both (not GSPO's loss, which
            is the sequences' in both). With AR `ar/mean_weight`, with Lopti `lopti/low_share` and `lopti/eta`. The
            statistics by probability as `tokens/...` (`UpdateStatistics.metrics`).
        """
        eta = self._threshold() if self._uses_lopti() else None
        if self.observer is not None:
            self.observer.begin()
        if self._uses_lopti() or (self.selective and self._fills_mini_batches()):
            status = self._train_in_passes(kl_ctl, eta)
        else:
            if self.defers_log_probs:
                self._compute_old_log_probs(self.replay_buffer.items)
            status = super().ppo_train(kl_ctl)
        observed = self.observer.metrics() if self.observer is not None else {}
        return status | self._token_metrics(eta) | observed

    def _train_in_passes(self, kl_ctl: float, eta: float | None) -> dict[str, float]:
        stages = [Stage(group, eta) for group in self._groups()] if eta is not None else [None]
        items, max_epochs = self.replay_buffer.items, self.max_epochs
        metrics = _PassMetrics()
        self.max_epochs = 1
        try:
            for epoch in range(max_epochs):
                mini_batches = list(self._mini_batches(items))
                if self.lopti.scope == "batch":
                    passes = [(mini_batch, stage) for stage in stages for mini_batch in mini_batches]
                else:
                    passes = [(mini_batch, stage) for mini_batch in mini_batches for stage in stages]
                deferred = self.defers_log_probs and epoch == 0
                if deferred:
                    first = {id(item) for item in passes[0][0]} if passes else set()
                    self._compute_old_log_probs(
                        [item for item in items if id(item) not in first or self._is_idle(item.advantages)]
                    )
                for i, (mini_batch, self.stage) in enumerate(passes):
                    if deferred and i == 0:
                        self.on_policy = _OnPolicyPass()
                    elif not self._count_over_ranks(mini_batch):
                        # The schedule counts data: it moves on where no step is taken.
                        self.actor_scheduler.step()
                        continue
                    status = self._train_pass(mini_batch, kl_ctl)
                    self.on_policy = None
                    num_tokens = self._count_over_ranks(mini_batch)
                    if num_tokens:
                        metrics.add(self.stage.group if self.stage else None, num_tokens, status)
        finally:
            self.stage, self.on_policy, self.max_epochs = None, None, max_epochs
        return metrics.summary(self.args)

    def _train_pass(self, mini_batch: list[Experience], kl_ctl: float) -> dict[str, float]:
        """Upstream's `ppo_train` on the samples of one optimizer step."""
        buffer, items = self.replay_buffer, self.replay_buffer.items
        if self.args.train.dynamic_batch_enable:
            buffer.items = mini_batch
        else:
            self.replay_buffer = _MicroBatches(mini_batch, buffer.sample_batch_size, self._collate)
        try:
            return super().ppo_train(kl_ctl)
        finally:
            self.replay_buffer, buffer.items = buffer, items
            if isinstance(self.actor_loss_fn, GroupPolicyLoss):
                self.actor_loss_fn.response_mask = self.actor_loss_fn.response_log_probs = None

    def _collate(self, batch: list[list[Experience]] | list[Experience]) -> Experience:
        """Upstream's collation of one micro-batch; the batch remembers its samples."""
        samples = batch[0] if isinstance(batch[0], list) else batch
        experience = make_experience_batch(samples, self.args.ds.packing_samples)
        experience.samples = samples
        return experience

    def _fills_mini_batches(self) -> bool:
        """Whether this rollout batch is a number of whole mini-batches, on every rank, and begins with a whole one.

        Upstream carries the micro-batches that fill none over to the next rollout batch's first optimizer step.
        """
        engine = self.actor.model
        rest = len(self.replay_buffer.items) % self._mini_batch_size()
        rest += engine.micro_steps % engine.gradient_accumulation_steps()
        return not self.strategy.all_reduce(float(rest), op="max")

    def _mini_batch_size(self) -> int:
        return self.args.train.batch_size // self.strategy.ds_device_mesh["dp"].size()

    def _mini_batches(self, items: list[Experience]) -> Iterator[list[Experience]]:
        """This rank's samples of each optimizer step of one epoch, shuffled where upstream shuffles, prompt by prompt.

        Only whole mini-batches, as many on every rank: of a short last rollout batch upstream would carry gradients
        over into the next update, which here would be another group's.
        """
        sharded = self.strategy.ring_attn_group is not None or self.args.ds.tensor_parallel_size > 1
        if not sharded and not self.args.train.dynamic_batch_enable:
            prompts = _by_prompt(items)
            items = [item for i in torch.randperm(len(prompts)).tolist() for item in prompts[i]]
        size = self._mini_batch_size()
        count = -int(self.strategy.all_reduce(-float(len(items) // size), op="max"))
        if count * size < len(items):
            logger.info(f"{len(items) - count * size} samples do not fill a mini-batch of {size}: left out")
        for i in range(count):
            yield items[i * size : (i + 1) * size]

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None
    ) -> dict[str, object]:
        """Upstream's step on one micro-batch, with reweighted advantages and the action mask of the tokens to update.

        In an on-policy pass the forward has to come first: what depends on the old log-probs follows it, in
        `_take_old_log_probs`.
        """
        response_mask = experience.action_mask
        if self.on_policy is not None:
            self.on_policy.experience, self.on_policy.response_mask = experience, response_mask
            experience.action_mask = response_mask * self._has_gradient(experience)
        else:
            old_log_probs = experience.action_log_probs
            if self.alpha:
                experience.advantages = reweight_advantages(experience.advantages, old_log_probs, self.alpha)
            self._narrow(experience, response_mask)
        if isinstance(self.actor_loss_fn, GroupPolicyLoss):
            self.actor_loss_fn.response_mask = response_mask
        with self._no_step_for_nothing(), self._observed(experience):
            status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        status["num_action_tokens"] = float(self.group.sum())
        return self._without_empty_means(status)

    def _narrow(self, experience: Experience, response_mask: torch.Tensor) -> None:
        """Sets the action mask to the tokens that this pass updates, and `group` to those its metrics are about."""
        self.group = response_mask
        if self.stage is not None:
            self.group = group_mask(self.stage.group, experience.action_log_probs, response_mask, self.stage.eta)
        if isinstance(self.actor_loss_fn, GroupPolicyLoss):
            self.actor_loss_fn.num_tokens = self.group.sum()
        experience.action_mask = (self.group * self._has_gradient(experience)).to(response_mask.dtype)

    def _has_gradient(self, experience: Experience) -> torch.Tensor:
        """(B, 1) whether any token of a response has an advantage, or could have a gradient without."""
        return ~self._is_idle(experience.advantages)[:, None]

    def _without_empty_means(self, status: dict) -> dict:
        """A micro-batch without tokens to update has means of nothing: they count as 0, with next to no weight."""
        metrics, weights = status["metrics"], status["weights"]
        for name, value in metrics.items():
            if weights[name] == "token" and isinstance(value, torch.Tensor):
                metrics[name] = value.nan_to_num(nan=0.0) if not status["num_action_tokens"] else value
            if self.stage is not None and name in ADDITIVE_METRICS:
                # Already divided by the mini-batch's token count: each micro-batch counts once.
                weights[name] = "sample"
        # Upstream divides by the ranks' total, which a micro-batch can leave at 0.
        status["num_action_tokens"] = max(status["num_action_tokens"], 1e-9)
        return status

    def _is_idle(self, advantages: torch.Tensor) -> torch.Tensor:
        """(...,) whether all advantages (..., A) of a response are 0, and nothing else has a gradient there."""
        return (advantages == 0).all(dim=-1) if self.skips_idle else torch.zeros_like(advantages[..., 0]).bool()

    # --- old log-probs from the first pass's own forward ------------------------------------------------------

    def _take_old_log_probs(self, actor: nn.Module, args: tuple, output) -> None:
        """Forward hook of the on-policy pass: the log-probs just computed are the old ones.

        In place: upstream's `training_step` already holds the tensors.
        """
        if self.on_policy is None:
            return
        experience = self.on_policy.experience
        old_log_probs, computed = experience.action_log_probs, experience.action_mask.bool()
        old_log_probs.copy_(torch.where(computed, output[0].detach(), old_log_probs))
        for sample, row in zip(experience.samples, old_log_probs.cpu(), strict=True):
            sample.action_log_probs = row[: len(sample.action_mask)]
        if self.alpha:
            experience.advantages.copy_(reweight_advantages(experience.advantages, old_log_probs, self.alpha))
        self._narrow(experience, self.on_policy.response_mask)
        self.on_policy.num_tokens += self.group.sum().item()

    def _observed(self, experience: Experience) -> AbstractContextManager:
        return self.observer.watching(experience) if self.observer is not None else nullcontext()

    @contextmanager
    def _no_step_for_nothing(self) -> Iterator[None]:
        """In an on-policy stage it shows only here that the group is empty on every rank: no step on stale momentum.

        The gradient is zero everywhere, so nothing is left behind for the next step.
        """
        if self.on_policy is None or self.stage is None:
            yield
            return
        optimizer = self.actor.model.optimizer
        step = optimizer.step

        def step_if_any(*args, **kwargs):
            if self._sum_over_ranks(self.on_policy.num_tokens)[0]:
                step(*args, **kwargs)
            else:
                self.idle_steps += 1

        with replaced_attribute(optimizer, "step", step_if_any):
            yield

    @torch.no_grad()
    def _compute_old_log_probs(self, items: list[Experience]) -> None:
        """Fills `action_log_probs` of the samples, as upstream's experience maker would have."""
        device = torch.cuda.current_device()
        batches = self._log_prob_batches([item for prompt in _by_prompt(items) for item in prompt])
        count = int(self.strategy.all_reduce(float(len(batches)), op="max"))
        # Under ZeRO-3 the ranks compute together: one that is done repeats a sample.
        batches += [self.replay_buffer.items[:1]] * (count - len(batches))
        self.actor.defers_log_probs = False
        self.actor.eval()
        for batch in batches:
            experience = make_experience_batch(batch).to_device(device)
            log_probs = self.actor(experience.sequences, experience.action_mask, experience.attention_mask).cpu()
            for sample, row in zip(batch, log_probs, strict=True):
                sample.action_log_probs = row[: len(sample.action_mask)]
        self.actor.train()
        self.actor.defers_log_probs = True

    def _log_prob_batches(self, items: list[Experience]) -> list[list[Experience]]:
        """As large as the user allows for the rollout's log-probs: by samples, or with dynamic batches by tokens."""
        if not self.args.train.dynamic_batch_enable:
            size = self.args.rollout.micro_batch_size
            return [items[i : i + size] for i in range(0, len(items), size)]
        batches, room = [], 0
        for item in items:
            if len(item.sequences) > room:
                batches.append([])
                room = self.args.rollout.max_tokens_per_gpu
            batches[-1].append(item)
            room -= len(item.sequences)
        return batches

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

    def _count_over_ranks(self, items: list[Experience]) -> float:
        """The tokens that the current stage updates, of the whole mini-batch."""
        log_probs = self._response_log_probs(items)
        mask = torch.ones_like(log_probs)
        if self.stage is not None:
            mask = group_mask(self.stage.group, log_probs, mask, self.stage.eta)
        return self._sum_over_ranks(mask.sum().item())[0]

    def _threshold(self) -> float:
        """η: as given, or the quantile of the whole rollout batch, over all ranks."""
        if self.lopti.quantile is None:
            return self.lopti.eta
        return self.quantiles(self._response_log_probs(self.replay_buffer.items), [self.lopti.quantile])[0]

    def quantiles(self, log_probs: torch.Tensor, shares: Sequence[float]) -> list[float]:
        """Below which probability each share of the tokens lies, over all ranks; (1, N) `log_probs` of this rank."""
        gathered: list = [None] * self.strategy.ds_device_mesh["dp"].size()
        dist.all_gather_object(gathered, log_probs.cpu(), group=self.strategy.ds_device_mesh["dp"].get_group())
        log_probs = torch.cat(gathered, dim=1)
        if not log_probs.numel():  # without a token there are no groups to divide, and any threshold will do
            return [1.0] * len(shares)
        return [probability_quantile(log_probs, torch.ones_like(log_probs), share) for share in shares]

    def _token_metrics(self, eta: float | None) -> dict[str, float]:
        if not self.alpha and eta is None:
            return {}
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


class _UpdateObserver:
    """Watches the micro-batches of a trainer's update and gathers what happens to tokens of each probability.

    Everything comes from tensors at hand: the loss's derivatives by the log-probs are taken through the loss function
    alone, and entropies and sums of squares come with the forward pass. Parameters and gradients stay as they are,
    bit for bit.
    """

    def __init__(self, trainer: TokenUpdateTrainer) -> None:
        self.trainer = trainer
        self.by_quartile = trainer.args.logger.probability_stats == "quartiles"
        # Its gradient is spread over the response: what AR changed does not show token by token.
        self.with_ar = bool(trainer.alpha) and trainer.args.actor.policy_loss_type != "gspo"
        self.is_watching = False
        trainer.actor.register_forward_hook(self._keep_forward, with_kwargs=True)
        trainer.actor_loss_fn.register_forward_pre_hook(self._keep_loss_arguments, with_kwargs=True)

    def begin(self) -> None:
        """Starts a rollout batch."""
        self.statistics = UpdateStatistics(torch.cuda.current_device(), self.by_quartile)
        self.first_step = self._steps_taken()

    def metrics(self) -> dict:
        """Of the rollout batch, over all ranks."""
        if self.by_quartile:
            log_probs = self.statistics.log_probs()[None]
            self.statistics.set_quartiles(self.trainer.quantiles(log_probs, [0.25, 0.5, 0.75]))
        group = self.trainer.strategy.ds_device_mesh["dp"].get_group()
        dist.all_reduce(self.statistics.sums, group=group)
        dist.all_reduce(self.statistics.histograms, group=group)
        return self.statistics.metrics(self.with_ar) | {HISTOGRAMS: self.statistics.histograms.flatten().tolist()}

    @contextmanager
    def watching(self, experience: Experience) -> Iterator[None]:
        """Records the micro-batch when its backward pass begins."""
        strategy = self.trainer.strategy
        backward = strategy.backward

        def record_and_go_backward(loss: torch.Tensor, *args, **kwargs) -> None:
            self._record(experience, loss)
            backward(loss, *args, **kwargs)

        self.is_watching = True
        try:
            with (
                replaced_attribute(strategy, "backward", record_and_go_backward),
                replaced_attribute(self.trainer.actor, "records_statistics", True),
            ):
                yield
        finally:
            self.is_watching = False
            self.log_probs = self.policy_log_probs = self.distribution = None

    def _steps_taken(self) -> int:
        return self.trainer.actor.model.global_steps - self.trainer.idle_steps

    def _keep_forward(self, actor: nn.Module, args: tuple, kwargs: dict, output) -> None:
        if not self.is_watching:
            return
        self.log_probs, result = output
        if self.trainer.selective and actor.statistics is not None:
            self.distribution = actor.statistics
        else:
            self.measure(result["logits"], args[0], args[1], kwargs["attention_mask"])

    def measure(self, logits, sequences, action_mask, attention_mask) -> None:
        """Takes the statistics of the distributions from the logits of upstream's actor."""
        length, width = sequences.shape[1], action_mask.shape[1]
        row, column = action_mask.bool().nonzero(as_tuple=True)
        before = row * length + length - width + column - 1  # the position that predicts the token
        targets = sequences.flatten()[before + 1]
        if self.trainer.actor.packing_samples:  # there is no padding among the logits
            before = (attention_mask.flatten().long().cumsum(0) - 1)[before]
        self.distribution = tuple(
            values.new_zeros(action_mask.shape).index_put_((row, column), values)
            for values in distribution_statistics(logits, before, targets)
        )

    def _keep_loss_arguments(self, loss_fn: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gives the policy loss a view of its own of the log-probs, whose derivatives are the policy gradient's."""
        log_probs, *rest = args
        self.policy_log_probs = log_probs.view_as(log_probs)
        if isinstance(loss_fn, GroupPolicyLoss) and loss_fn.response_log_probs is not None:
            loss_fn.response_log_probs = self.policy_log_probs
        # The loss is a mean over the optimizer step's tokens, times the ranks.
        self.tokens_per_weight = kwargs["batch_num_tokens"] / kwargs["dp_size"]
        return (self.policy_log_probs, *rest), kwargs

    def _record(self, experience: Experience, loss: torch.Tensor) -> None:
        trainer = self.trainer
        whole, policy = torch.autograd.grad(loss, [self.log_probs, self.policy_log_probs], retain_graph=True)
        old_log_probs, advantages = experience.action_log_probs, experience.advantages
        before_ar = whole
        if trainer.alpha:
            factor = advantage_weights(old_log_probs, trainer.alpha).clamp(min=torch.finfo(torch.float32).tiny)
            before_ar, advantages = whole - policy + policy / factor, advantages / factor
        selected = trainer.group.flatten().nonzero()[:, 0]
        is_computed = experience.action_mask.bool()
        entropies, squared_rest = self.distribution
        tokens = TokenUpdates(
            old_log_probs=old_log_probs,
            log_probs=self.log_probs.detach(),
            advantages=advantages,
            weights=whole * self.tokens_per_weight,
            weights_before_ar=before_ar * self.tokens_per_weight,
            is_clipped=is_computed & (advantages != 0) & (policy == 0),
            is_computed=is_computed,
            entropies=entropies,
            squared_rest=squared_rest,
        )
        is_moved = self._steps_taken() > self.first_step
        self.statistics.add(TokenUpdates(*(values.flatten()[selected] for values in tokens)), is_moved)


class _OnPolicyPass:
    """What the first pass over a rollout batch learns on its way."""

    experience: Experience  # the current micro-batch
    response_mask: torch.Tensor  # (B, A), its action mask as it came
    num_tokens = 0.0  # of the stage's group, so far


class _MicroBatches:
    """A replay buffer for upstream's `ppo_train` whose items are the micro-batches of one optimizer step."""

    sample_batch_size = 1

    def __init__(self, items: list[Experience], size: int, collate_fn) -> None:
        self.micro_batches = [items[i : i + size] for i in range(0, len(items), size)]
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> list[Experience]:
        return self.micro_batches[index]


def _by_prompt(items: list[Experience]) -> list[list[Experience]]:
    """Single samples, unpadded, with those of one prompt together."""
    prompts = defaultdict(list)
    for item in items:
        first_action = len(item.sequences) - len(item.action_mask) + int(item.action_mask.long().argmax())
        prompts[tuple(item.sequences[:first_action].tolist())].append(item)
    return list(prompts.values())


class _PassMetrics:
    """Gathers what upstream's `ppo_train` returns per pass into one status per rollout batch."""

    def __init__(self) -> None:
        self.passes: dict[str | None, list[tuple[float, dict[str, float]]]] = defaultdict(list)

    def add(self, group: str | None, num_tokens: float, status: dict[str, float]) -> None:
        self.passes[group].append((num_tokens, status))

    def summary(self, args) -> dict[str, float]:
        """Means over the passes: of a pass's own metrics by stage, weighted by tokens; of the samples' overall. The
        learning rate and the norm of the gradient are the last pass's."""
        of_pass = {"policy_loss", "entropy_loss", "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"}
        of_pass |= {"kl", "logprobs_diff"} if args.algo.kl.use_loss else set()
        # GSPO's loss is the sequences', in both stages: it has no sum.
        summed = ADDITIVE_METRICS[1:] if args.actor.policy_loss_type == "gspo" else ADDITIVE_METRICS
        summary: dict[str, float] = {}
        for group, passes in self.passes.items():
            statuses = [status for _, status in passes]
            total = sum(num_tokens for num_tokens, _ in passes)
            if group is not None:
                summary[f"lopti/{group}/num_tokens"] = total
            for name in set().union(*statuses):
                mean = sum(status.get(name, 0.0) for status in statuses) / len(statuses)
                if name == "actor_lr":
                    summary[name] = statuses[-1][name]
                    continue
                if name == "actor_grad_norm":  # of the last step that was taken, as upstream's
                    last = [status[name] for status in statuses if name in status][-1]
                    summary[name if group is None else f"lopti/{group}/{name}"] = last
                    continue
                if name not in of_pass:
                    summary[name] = mean  # of the samples: the same in both stages
                    continue
                if group is None:
                    summary[name] = sum(n * status.get(name, 0.0) for n, status in passes) / total
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
