"""Trains the policy on a rollout batch, in the passes of its token methods (docs/architecture.md)."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor
from tqdm import tqdm

from arlopti_openrlhf.forward.transfer import on_device
from arlopti_openrlhf.update import old_log_probs, optimizer_steps
from arlopti_openrlhf.update.loss import Objective, micro_batch_loss, token_updates
from arlopti_openrlhf.update.metrics import PassMetrics, UpdateMetrics, micro_batch_status
from arlopti_openrlhf.update.micro_batches import is_idle, micro_batches
from arlopti_openrlhf.update.plan import MiniBatch, Planner, in_order
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import PassWeights, Sample, numbered, stand_in, without_truncated
from arlopti_openrlhf.update.settings import Settings
from arlopti_openrlhf.update.token_statistics import UpdateStatistics
from arlopti_openrlhf.update.token_weights import TokenWeights


class TokenUpdateTrainer(ppo_actor.ActorPPOTrainer):
    """`ActorPPOTrainer` on a `SelectiveActor`, with token methods or without.

    Its gradients are those of `reference.ReferenceTrainer`, and without a method upstream's. A pass computes only the
    tokens that it updates. The samples of a prompt stay together, the first pass gives log π_old, and idle responses
    take no part in the passes, because they have no gradient.

    Raises:
        ValueError: a method, a setting or the kind of model cannot be trained like that.
    """

    settings: Any = None  # `Settings`; those of the flags if a subclass has none of its own

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.settings = self.settings or Settings.of(self.args)
        if self.actor.is_vlm:  # which the command knows only of models on the driver's machine
            raise ValueError("--actor.update selective: vision models need OpenRLHF's own update, stock")
        if (place := type(self).training_step.__module__) != ppo_actor.__name__:
            raise ValueError(f"training_step is that of {place}, which OpenRLHF's own update alone calls, stock")
        methods = self.settings.load_methods(self.args, is_selective=True)
        self.token_weights = TokenWeights(methods, self.actor_loss_fn.token_level_loss, self.settings.normalizes)
        self.ranks = Ranks(self.strategy)
        optimizer_steps.share_among_passes(self, len(self.token_weights.labels))
        self.planner = Planner(self.actor, self.args, self.settings, self.ranks)

    @functools.cached_property
    def first_pass_gives_old_log_probs(self) -> bool:
        """Whether log π_old is what the first pass's forward gives. The weights follow from it then."""
        weights = self.token_weights
        # A group that proves empty would have the gradient of the experts' balancing loss.
        balances_experts_in_groups = self.aux_loss and any(method.groups for method in weights.methods)
        is_needed_before = weights.needs_rollout_batch or old_log_probs.needed_before(self.args)
        return not (is_needed_before or balances_experts_in_groups or old_log_probs.is_random(self.actor))

    @property
    def defers_old_log_probs(self) -> bool:
        """Whether the update computes log π_old, so that upstream's experience maker need not.

        A forward that gives entropies gives π_old too. The experience maker has no room for entropies.
        """
        computes = self.first_pass_gives_old_log_probs or self.token_weights.needs_entropies
        return computes and not old_log_probs.needed_before(self.args)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. Those of a pass appear under its name where there are several, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of all (except GSPO's loss, which
            is the sequences' in each). What token methods log of their weights (`Method.metrics`), as
            `ar/mean_weight` and `token_method/...`. The statistics by probability as `tokens/...`
            (`UpdateStatistics.metrics`).
        """
        samples = numbered(self.replay_buffer.items)
        if self.settings.masks_truncated:
            samples = without_truncated(samples)
        self.replay_buffer.items = [*samples]
        if self.actor.shortcuts is None:
            longest = max(samples, key=lambda sample: sample.length, default=stand_in())
            self.actor.check(longest.sequences[None].to(torch.cuda.current_device()))
        has_statistics = self.settings.statistics != "off"
        return self._train(samples, kl_ctl, UpdateStatistics(torch.cuda.current_device()) if has_statistics else None)

    def _train(self, samples: list[Sample], kl_ctl: float, statistics: UpdateStatistics | None) -> dict[str, float]:
        """Train on each mini-batch in each pass."""
        # Eq. 4, and Algorithm 1, lines 11-13: weights and groups, from log π_old. The first pass gives them, unless
        # they must be known before.
        known = self.token_weights.knows_nothing
        if not (self.token_weights.methods and self.first_pass_gives_old_log_probs):
            if self.token_weights.needs_entropies:
                old_log_probs.compute(self.actor, samples, self.planner, with_entropies=True)
            known = self.token_weights.learn(samples, self.ranks)
            self._weigh(samples, known)

        # Lines 14-19: a step on the low-probability tokens, which is Lopti's pass 0, then one on the others, pass 1.
        # With scope "batch" all mini-batches take pass 0 before any takes pass 1.
        objective = Objective(self.actor_loss_fn, self.args, kl_ctl, self.args.actor.aux_loss_coef * self.aux_loss)
        metrics, trained = UpdateMetrics(self.args), []
        steps_before = optimizer_steps.taken(self.actor.model)
        for epoch in range(self.max_epochs):
            mini_batches = self.planner.epoch(samples)
            order = in_order(mini_batches, len(self.token_weights.labels), self.settings.scope)
            trained = [sample for mini_batch in mini_batches for sample in mini_batch.samples]
            # The first pass gives π_old of its own samples. That of the others is computed before θ moves. A later
            # epoch has another order, and may train on samples that fill no mini-batch in this one.
            is_first = self.first_pass_gives_old_log_probs and epoch == 0 and bool(order)
            if is_first:
                self._learn_the_others(trained if self.max_epochs == 1 else samples, order[0][0])
            name = f"Train epoch [{epoch + 1}/{self.max_epochs}]"
            for mini_batch, index in tqdm(order, desc=name, disable=not self.strategy.is_rank_0()):
                is_moved = optimizer_steps.taken(self.actor.model) > steps_before
                num_tokens, status = self._pass(mini_batch, index, objective, is_first, is_moved, statistics)
                metrics.add(self.token_weights.labels[index], num_tokens, status)
                is_first = False
        of_methods = self.token_weights.metrics([sample.weights for sample in trained], known, self.ranks)
        status = metrics.summary() | of_methods
        if statistics is None:
            return status
        statistics.sums = self.ranks.sum_tensor(statistics.sums)
        is_whole, is_rescaled = self.token_weights.coverage(samples, self.ranks)
        is_gspo = self.args.actor.policy_loss_type == "gspo"  # whose gradient is spread over the response
        return status | statistics.metrics(is_whole, is_rescaled and not is_gspo)

    def _weigh(self, samples: Sequence[Sample], known: Any) -> None:
        """Give samples the weights that follow from their log π_old."""
        for sample in samples:
            if sample.weights is None:
                sample.weights = self.token_weights.of(sample, known)

    def _learn_the_others(self, samples: list[Sample], first: MiniBatch) -> None:
        """Compute log π_old of all samples but those of the first mini-batch whose forward will give it."""
        given = [s for s in first.samples if s.action_mask.any() and not is_idle(s.advantages, self.args)]
        others = [sample for sample in samples if not any(sample is own for own in given)]
        old_log_probs.compute(self.actor, others, self.planner, self.token_weights.needs_entropies)
        self._weigh(others, self.token_weights.knows_nothing)

    def _pass(
        self,
        mini_batch: MiniBatch,
        index: int,
        objective: Objective,
        is_first: bool,
        is_moved: bool,
        statistics: UpdateStatistics | None,
    ) -> tuple[float, dict[str, float]]:
        """Take one optimizer step on the tokens with a weight. Return their number and the metrics, of all ranks.

        Args:
            mini_batch: this rank's.
            index: of the pass.
            objective: what is minimized.
            is_first: whether the forward gives log π_old, and with it the weights, so that only its end shows whether
                there is a token to update.
            is_moved: whether this rollout batch has moved θ already.
            statistics: gets what the loss does to the tokens.
        """
        engine, samples = self.actor.model, mini_batch.samples
        counted = [sample.action_mask if is_first else sample.weights.counted[index] for sample in samples]
        num_tokens, *totals = self.ranks.sum(0 if is_first else _num_updated(samples, index), *_totals(counted))
        if not (totals[0] if is_first else num_tokens):
            optimizer_steps.pass_over(engine, self.actor_scheduler)
            self._average_weights()
            return 0, {}
        metrics, learned = PassMetrics(engine.gradient_accumulation_steps()), []
        for batch in micro_batches(mini_batch.micro_batches, index, totals, self.actor, self.strategy):
            # Forward: (B, A) log π_θ of the selected tokens, 0 elsewhere.
            learns_entropies = is_first and self.token_weights.needs_entropies
            self.actor.train()
            log_probs, output = self.actor(
                batch.sequences,
                batch.selected,
                attention_mask=batch.attention_mask,
                return_output=True,
                return_entropy=self.args.actor.entropy_coef is not None,
                return_statistics=statistics is not None or learns_entropies,
                return_aux_loss=self.aux_loss,
                layout=batch.layout,
            )
            # Weigh. In the first pass θ is π_old still.
            weights = batch.weights
            if is_first:
                batch.action_log_probs = old_log_probs.given_by(log_probs, batch)
            if weights is None:  # the methods weigh on the CPU, so the host waits for the forward pass
                entropies = output.statistics[0] if learns_entropies else None
                old_log_probs.store(batch.samples, batch.action_log_probs, entropies)
                self._weigh(batch.samples, self.token_weights.knows_nothing)
                weights = PassWeights.of([sample.weights for sample in batch.samples], index)
                (weights,) = on_device([weights.among(batch.plan.places)], log_probs.device)
            elif is_first:
                learned.append((batch.samples, batch.action_log_probs))
            # Loss of the tokens with a weight, what it does to them, and backward.
            batch.layout.trained = weights.trained
            result = micro_batch_loss(batch, weights, log_probs, output, objective)
            if statistics is not None:
                statistics.add(token_updates(result, batch, weights, log_probs, output.statistics), is_moved)
            self.strategy.backward(result.loss, self.actor, self.actor_optim)
            responses = sum(int(sample.action_mask.sum()) for sample in batch.samples)
            metrics.add(micro_batch_status(batch, result.logged, len(weights.places), responses))
        if is_first:
            (num_tokens,) = self.ranks.sum(_num_updated(samples, index))
        figures: dict[str, float] = {}
        if num_tokens:
            self.strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
            figures["actor_lr"] = self.actor_scheduler.get_last_lr()[0]
            figures["actor_grad_norm"] = self.strategy.get_grad_norm(self.actor)
        else:
            optimizer_steps.skip(engine, self.actor_scheduler)
        self._average_weights()
        optimizer_steps.count(engine)
        # Now that all micro-batches are under way the host may wait for them.
        for own, log_probs in learned:
            old_log_probs.store(own, log_probs)
        return num_tokens, metrics.reduce(self.ranks) | figures

    def _average_weights(self) -> None:
        """Let EMA count the micro-batches of a mini-batch. It averages once for so many of them."""
        if self.ema_model:
            for _ in range(self.actor.model.gradient_accumulation_steps()):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")


def _num_updated(samples: Sequence[Sample], index: int) -> int:
    return sum(int(sample.weights.updated[index].sum()) for sample in samples)


def _totals(masks: Sequence[Tensor]) -> tuple[int, int]:
    """Return the tokens that masks (A,) of samples select, and how many of them select any."""
    lengths = [int(mask.sum()) for mask in masks]
    return sum(lengths), sum(length > 0 for length in lengths)
