"""Trains the policy on a rollout batch, in the passes of its token methods (docs/architecture.md)."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from openrlhf.utils.logging_utils import init_logger
from torch import Tensor
from tqdm import tqdm

from arlopti_openrlhf import learning_rate, token_method
from arlopti_openrlhf.activation_memory import is_known
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import mini_batches, old_log_probs, optimizer_steps, partition
from arlopti_openrlhf.update.checkpointing import Checkpointing
from arlopti_openrlhf.update.first_update import GpuWatch, report
from arlopti_openrlhf.update.metrics import PassMetrics, UpdateMetrics, statistics_metrics
from arlopti_openrlhf.update.mini_batches import MiniBatch
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample, stand_in
from arlopti_openrlhf.update.step import StepTrainer, computes_selected, is_idle
from arlopti_openrlhf.update.token_statistics import UpdateStatistics

logger = init_logger(__name__)


class TokenUpdateTrainer(StepTrainer):
    """`ActorPPOTrainer` with token methods, among them AR (Eq. 4) and Lopti (Algorithm 1, lines 11-19).

    A method gives a weight to each token, in one or several passes. A pass takes one optimizer step on the tokens of a
    mini-batch that have a weight. What follows from that:
    1. With Lopti two steps are taken where upstream takes one. So the learning-rate schedule spans twice the steps.
       EMA's decay and the coefficient of the MoE loss apply at every step, so the passes share them.
    2. A pass without a token on any rank takes no step.
    3. With a `SelectiveActor` a pass computes only the tokens that it updates. The samples of a prompt stay together,
       the first pass gives log π_old, and idle responses, which have no gradient, are not computed.

    Without a method on upstream's actor, upstream's loop trains. With the statistics off too, nothing of ours runs.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.checkpointing = Checkpointing(self.actor.model.module, self.args, self.settings)
        self.ranks = Ranks(self.strategy)
        # Of the first mini-batch of the run, which the log describes: the tokens of its micro-batches
        self.first_tokens: list[int] = []
        self.fits_tokens = True  # whether these micro-batches follow from memory
        # What counts optimizer steps is shared out between the passes. At equal data the learning rate and the average
        # of the weights are those of one pass.
        passes = len(self.token_weights.labels)
        learning_rate.stretch(self.actor_scheduler, passes)
        self.ema_beta **= 1 / passes

    @functools.cached_property
    def first_pass_gives_old_log_probs(self) -> bool:
        """Whether log π_old is what the first pass's forward gives. The weights follow from it then."""
        weights = self.token_weights
        if weights.needs_rollout_batch or not isinstance(self.actor, SelectiveActor):
            return False
        balances_experts_in_groups = self.aux_loss and any(method.groups for method in weights.methods)
        return old_log_probs.can_defer(self.args, self.actor, balances_experts_in_groups)

    @property
    def defers_old_log_probs(self) -> bool:
        """Whether the update computes log π_old, so that upstream's experience maker need not.

        A forward that gives entropies gives π_old too. The experience maker has no room for entropies.
        """
        computes = self.first_pass_gives_old_log_probs or self.token_weights.needs_entropies
        return computes and not old_log_probs.in_the_reward(self.args)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. Those of a pass appear under its name where there are several, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of all (except GSPO's loss, which
            is the sequences' in each). What token methods log of their weights (`Method.metrics`), as
            `ar/mean_weight` and `token_method/...`. The statistics by probability as `tokens/...`
            (`UpdateStatistics.metrics`).
        """
        self.steps_before = self.actor.model.global_steps
        if self.settings.statistics != "off":
            self.statistics = UpdateStatistics(torch.cuda.current_device())
        methods = self.token_weights.methods
        is_ours = methods or isinstance(self.actor, SelectiveActor)
        reports = self._reports() and torch.cuda.is_available()
        with GpuWatch() if reports else nullcontext() as watch:
            status = self._train(kl_ctl) if is_ours else super().ppo_train(kl_ctl)
        if watch and self.first_tokens:
            logger.info(report(watch, self.first_tokens, self.checkpointing, self.fits_tokens))
        if self.statistics is None:
            return status
        # GSPO's gradient is spread over the response.
        is_known = self.args.actor.policy_loss_type != "gspo"
        before = token_method.name_of_reweighting(methods) if is_known else None
        return status | statistics_metrics(self.statistics, self.ranks, before)

    def _train(self, kl_ctl: float) -> dict[str, float]:
        """Train on each mini-batch in each pass."""
        samples = [Sample(**vars(item)) for item in self.replay_buffer.items]
        self.replay_buffer.items = [*samples]
        if computes_selected(self.actor) and self.actor.shortcuts is None:
            longest = max(samples, key=lambda sample: len(sample.sequences), default=stand_in())
            self.actor.check(longest.sequences[None].to(torch.cuda.current_device()))

        # Eq. 4, and Algorithm 1, lines 11-13: weights and groups, from log π_old. The first pass gives them, unless
        # they must be known before.
        known = self.token_weights.knows_nothing
        if not (self.token_weights.methods and self.first_pass_gives_old_log_probs):
            if self.token_weights.needs_entropies:
                old_log_probs.compute(self.actor, samples, self.args, self.ranks, with_distributions=True)
            known = self.token_weights.weigh_all(samples, self.ranks)

        # Lines 14-19: a step on the low-probability tokens, which is Lopti's pass 0, then one on the others, pass 1.
        # With scope "batch" all mini-batches take pass 0 before any takes pass 1.
        metrics, trained = UpdateMetrics(self.args), []
        for epoch in range(self.max_epochs):
            batches = self._mini_batches(samples)
            order = mini_batches.in_order(batches, len(self.token_weights.labels), self.settings.scope)
            trained = [sample for mini_batch in batches for sample in mini_batch.samples]
            # The first pass gives π_old of its own samples. That of the others is computed before θ moves. A later
            # epoch has another order, and may train on samples that fill no mini-batch in this one.
            is_first = self.first_pass_gives_old_log_probs and epoch == 0 and bool(order)
            if is_first:
                self._learn_the_others(trained if self.max_epochs == 1 else samples, order[0][0])
            name = f"Train epoch [{epoch + 1}/{self.max_epochs}]"
            for mini_batch, index in tqdm(order, desc=name, disable=not self.strategy.is_rank_0()):
                take_pass = self._first_pass if is_first else self._pass
                metrics.add(self.token_weights.labels[index], *take_pass(mini_batch, index, kl_ctl))
                is_first = False
            if self.statistics is not None and self.token_weights.methods:
                self.statistics.add_left_out(self.token_weights.left_out(trained))
        return metrics.summary() | self.token_weights.metrics(trained, known, self.ranks)

    def _mini_batches(self, samples: list[Sample]) -> list[MiniBatch]:
        """Return this rank's mini-batches of one epoch, and report once how many tokens are computed."""
        batches, limit = mini_batches.divide(
            samples, self.actor, self.replay_buffer, self.strategy, self.ranks, self.checkpointing
        )
        if batches and self._reports():
            self.first_tokens = [partition.cost(samples) for samples in batches[0].micro_batches]
            described = partition.describe(batches[0].micro_batches, limit)
            if self.args.actor.gradient_checkpointing_enable:
                described += f"; gradient checkpointing: {self.checkpointing.level}"
            logger.info(f"selective update, first mini-batch of this rank: {described}")
            self.fits_tokens = isinstance(limit, int) and is_known(self.checkpointing.config)
            if self.settings.fills_memory and not self.fits_tokens:
                why = limit if isinstance(limit, str) else "the size of the model's layers is not known"
                logger.warning(f"--actor.fill_memory has no effect: {why}")
        return batches

    def _reports(self) -> bool:
        """Return whether this is the selective update of a run that has not been reported yet, on rank 0."""
        return isinstance(self.actor, SelectiveActor) and not self.first_tokens and self.strategy.is_rank_0()

    def _learn_the_others(self, samples: list[Sample], first: MiniBatch) -> None:
        """Compute log π_old of all samples but those of the first mini-batch whose forward will give it."""
        given = [sample for sample in first.samples if not is_idle(sample.advantages, self.actor, self.args)]
        others = [sample for sample in samples if not any(sample is own for own in given)]
        with_entropies = self.token_weights.needs_entropies
        old_log_probs.compute(self.actor, others, self.args, self.ranks, with_distributions=with_entropies)
        self.token_weights.weigh(others)

    def _pass(self, mini_batch: MiniBatch, index: int, kl_ctl: float) -> tuple[float, dict[str, float]]:
        """Take one optimizer step on the tokens with a weight. Return their number and the metrics, of all ranks."""
        engine, weights = self.actor.model, [sample.weights for sample in mini_batch.samples]
        num_tokens, *totals = self.ranks.sum(
            sum(int(own.updated[index].sum()) for own in weights), *_totals([own.counted[index] for own in weights])
        )
        if not num_tokens:
            optimizer_steps.pass_over(engine, self.actor_scheduler)
            self.average_weights(engine.gradient_accumulation_steps())
            return 0, {}
        metrics = PassMetrics(engine.gradient_accumulation_steps())
        for i, batch in enumerate(self.micro_batches(mini_batch, index, totals)):
            metrics.add(self.training_step(batch, kl_ctl, i))
        figures = self.optimizer_step(engine.gradient_accumulation_steps())
        optimizer_steps.count(engine)
        return num_tokens, metrics.reduce(self.ranks) | figures

    def _first_pass(self, mini_batch: MiniBatch, index: int, kl_ctl: float) -> tuple[float, dict[str, float]]:
        """Take the first pass, whose forward gives log π_old, because θ has not moved, and with it the weights.

        So whether there is a token with a weight shows at its end only.
        """
        engine, samples, learned = self.actor.model, mini_batch.samples, []
        totals = self.ranks.sum(*_totals([sample.action_mask for sample in samples]))
        metrics = PassMetrics(engine.gradient_accumulation_steps())
        for i, batch in enumerate(self.micro_batches(mini_batch, index, totals, gives_old_log_probs=True)):
            metrics.add(self.training_step(batch, kl_ctl, i))
            if not self.token_weights.methods:
                learned.append((batch.samples, batch.action_log_probs))
        (num_tokens,) = self.ranks.sum(sum(int(sample.weights.updated[index].sum()) for sample in samples))
        figures: dict[str, float] = {}
        if num_tokens:
            figures = self.optimizer_step(engine.gradient_accumulation_steps())
        else:
            optimizer_steps.skip(engine, self.actor_scheduler)
            self.average_weights(engine.gradient_accumulation_steps())
        optimizer_steps.count(engine)
        # Now that all micro-batches are under way the host may wait for them.
        for own, log_probs in learned:
            old_log_probs.store(own, log_probs)
        return num_tokens, metrics.reduce(self.ranks) | figures


def _totals(masks: Sequence[Tensor]) -> tuple[int, int]:
    """Return the tokens that masks (A,) of samples select, and how many of them select any."""
    lengths = [int(mask.sum()) for mask in masks]
    return sum(lengths), sum(length > 0 for length in lengths)
