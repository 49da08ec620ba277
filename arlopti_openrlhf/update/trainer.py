"""Trains the policy on a rollout batch, with AR and the two stages of Lopti.

docs/architecture.md walks through it. One micro-batch's way is `micro_batch.MicroBatchTrainer.training_step`.
"""

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm
from tqdm import tqdm

from arlopti_openrlhf.update import lora, old_log_probs, optimizer_steps, passes
from arlopti_openrlhf.update.metrics import PassMetrics, UpdateMetrics, method_metrics, rollout_gap
from arlopti_openrlhf.update.micro_batch import MicroBatchTrainer
from arlopti_openrlhf.update.passes import MiniBatch, Pass, Stage
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS, UpdateStatistics


class TokenUpdateTrainer(MicroBatchTrainer):
    """`ActorPPOTrainer` with Advantage Reweighting (Eq. 4) and Lopti (Algorithm 1, lines 11-19).

    A rollout batch is trained in passes. A pass takes one mini-batch through one stage, which updates the
    low-probability tokens, the others, or all. It takes one optimizer step. What follows from that:
    1. With Lopti two steps are taken where upstream takes one. So the learning-rate schedule spans twice the steps.
       EMA's decay and the coefficient of the MoE loss apply at every step, so the two stages share them.
    2. A group that is empty on every rank takes no step.
    3. With a `SelectiveActor` a pass computes only the tokens that it updates. The samples of a prompt stay together,
       the first pass gives log π_old, and idle responses, which have no gradient, are not computed.
    4. LoRA's weights are sent to vLLM merged.

    With both methods, the selective actor and the statistics off, upstream's code runs unchanged.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        balances_experts_in_stages = self.aux_loss and self.uses_lopti
        self.defers_old_log_probs = self.is_selective and old_log_probs.can_defer(
            self.args, self.actor, balances_experts_in_stages
        )

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. With Lopti those of a pass appear for each stage, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of both (except GSPO's loss, which
            is the sequences' in both). With AR `ar/mean_weight`, with Lopti `lopti/low_share` and `lopti/eta`. The
            statistics by probability as `tokens/...` (`UpdateStatistics.metrics`). `skipped_optimizer_steps` counts
            those that were refused (`update.guard`), and `rollout/gap` compares vLLM's log-probs with the actor's.
        """
        engine = self.actor.model
        skipped = engine.skipped_steps
        status = super().ppo_train(kl_ctl) if self.is_off else self._update(kl_ctl)
        status |= {"skipped_optimizer_steps": engine.skipped_steps - skipped}
        return status | rollout_gap(self.replay_buffer.items, self.ranks)

    def _update(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer in passes, or by upstream's loop where one pass is all."""
        if self.observes:
            by_quartile = self.args.logger.probability_stats == "quartiles"
            self.statistics = UpdateStatistics(torch.cuda.current_device(), by_quartile)
        eta = self._threshold() if self.uses_lopti else None
        items = self.replay_buffer.items
        if self.uses_lopti or (self.is_selective and self._fills_mini_batches()):
            status, items = self._train_in_passes(kl_ctl, passes.stages(self.lopti, eta))
        else:
            if self.defers_old_log_probs:
                old_log_probs.compute(self.actor, items, self.args, self.ranks)
            status = super().ppo_train(kl_ctl)
        return status | method_metrics(items, self.alpha, eta, self.ranks) | self._statistics_metrics()

    def _train_in_passes(self, kl_ctl: float, stages: list[Stage]) -> tuple[dict[str, float], list[Experience]]:
        """Train on each mini-batch in each stage; return the metrics and the samples that were trained on."""
        metrics, trained = UpdateMetrics(self.args), []
        for epoch in range(self.max_epochs):
            order = passes.in_order(mini_batches := self._mini_batches(), stages, self.lopti.scope)
            trained = [sample for mini_batch in mini_batches for sample in mini_batch.samples]
            # The first pass gives π_old of its own samples. That of the others is computed before θ moves. A later
            # epoch is shuffled anew, and may train on samples that fill no mini-batch in this one.
            is_deferred = self.defers_old_log_probs and epoch == 0 and bool(order)
            if is_deferred:
                first = set(map(id, order[0][0].samples))
                needed = trained if self.max_epochs == 1 else self.replay_buffer.items
                rest = [item for item in needed if id(item) not in first or self.is_idle(item.advantages)]
                old_log_probs.compute(self.actor, rest, self.args, self.ranks)
            bar = tqdm(
                order, desc=f"Train epoch [{epoch + 1}/{self.max_epochs}]", disable=not self.strategy.is_rank_0()
            )
            for i, (mini_batch, stage) in enumerate(bar):
                this_pass = Pass(stage, gives_old_log_probs=is_deferred and i == 0)
                if not this_pass.gives_old_log_probs and not self._any_token(mini_batch, stage):
                    self._skip_pass(mini_batch)
                    continue
                status = self._train_pass(mini_batch, this_pass, kl_ctl)
                (num_tokens,) = self.ranks.sum(this_pass.num_tokens)
                if num_tokens:
                    metrics.add(this_pass, num_tokens, status)
        return metrics.summary(), trained

    def _skip_pass(self, mini_batch: MiniBatch) -> None:
        """Count a pass without an optimizer step, as the schedule and EMA count data."""
        optimizer_steps.pass_over(self.actor.model, self.actor_scheduler)
        if self.ema_model:
            # `moving_average` averages at every micro-batch that ends a step, which it counts itself.
            for _ in range(1 if self.args.train.dynamic_batch_enable else len(mini_batch.micro_batches)):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")

    def _train_pass(self, mini_batch: MiniBatch, this_pass: Pass, kl_ctl: float) -> dict[str, float]:
        """Take the micro-batches of one optimizer step through `training_step`; return the metrics of all ranks."""
        micro_batches, is_dynamic = mini_batch.micro_batches, self.args.train.dynamic_batch_enable
        metrics = PassMetrics(this_pass.stage.group is not None, is_dynamic)
        batches = (make_experience_batch(samples, self.args.ds.packing_samples) for samples in micro_batches)
        if is_dynamic:
            batches = ((experience, None) for experience in batches)  # the replay buffer holds the denominators
        else:
            batches = iter_grad_accum_global_norm(
                batches, self.strategy, self.strategy.accumulated_gradient, lambda experience: experience.action_mask
            )
        for i, (experience, loss_batch_info) in enumerate(batches):
            experience.to_device(torch.cuda.current_device())
            step = mini_batch.first_step + i
            metrics.add(self.training_step(experience, kl_ctl, step, loss_batch_info, this_pass))
            if this_pass.gives_old_log_probs:
                old_log_probs.store(micro_batches[i], experience.action_log_probs)
        return metrics.reduce(self.ranks)

    def _mini_batches(self) -> list[MiniBatch]:
        size = self._mini_batch_size()
        if self.args.train.dynamic_batch_enable:
            self.replay_buffer.setup_dynamic_batch(self.strategy)
            return passes.dynamic_mini_batches(self.replay_buffer, size)
        is_sharded = self.strategy.ring_attn_group is not None or self.args.ds.tensor_parallel_size > 1
        micro_batch_size = self.replay_buffer.sample_batch_size
        return passes.mini_batches(self.replay_buffer.items, micro_batch_size, size, not is_sharded, self.ranks)

    def _mini_batch_size(self) -> int:
        return self.args.train.batch_size // self.ranks.count

    def _fills_mini_batches(self) -> bool:
        """Return whether this rollout batch is a number of whole mini-batches, on every rank, and begins with one.

        Upstream carries the micro-batches that fill none over to the next rollout batch's first optimizer step.
        """
        engine = self.actor.model
        rest = len(self.replay_buffer.items) % self._mini_batch_size()
        return not self.ranks.max(rest + engine.micro_steps % engine.gradient_accumulation_steps())

    def _threshold(self) -> float:
        """Return η as given, or as the quantile of the whole rollout batch over all ranks."""
        if self.lopti.quantile is None:
            return self.lopti.eta
        return self.ranks.quantiles(passes.response_log_probs(self.replay_buffer.items), [self.lopti.quantile])[0]

    def _any_token(self, mini_batch: MiniBatch, stage: Stage) -> bool:
        return bool(self.ranks.sum(passes.count_tokens(mini_batch.samples, stage))[0])

    def _statistics_metrics(self) -> dict:
        if self.statistics is None:
            return {}
        if self.statistics.by_quartile:
            log_probs = self.statistics.log_probs()[None]
            self.statistics.set_quartiles(self.ranks.quantiles(log_probs, [0.25, 0.5, 0.75]))
        self.statistics.sums = self.ranks.sum_tensor(self.statistics.sums)
        histograms = self.ranks.sum_tensor(self.statistics.histograms)
        # GSPO's gradient is spread over the response: what AR changed does not show token by token.
        with_ar = bool(self.alpha) and self.args.actor.policy_loss_type != "gspo"
        return self.statistics.metrics(with_ar) | {HISTOGRAMS: histograms.flatten().tolist()}

    def broadcast_to_vllm(self) -> None:
        """Send the weights to vLLM, as upstream; a LoRA model's are sent merged, under its base model's names."""
        if not self.args.ds.lora.rank:
            return super().broadcast_to_vllm()
        with lora.merged_parameters(self.actor.model.module, gathered=self.args.ds.zero_stage == 3):
            super().broadcast_to_vllm()
