"""Trains the policy on a rollout batch, in the passes of its token methods.

docs/architecture.md walks through it. A micro-batch goes through `step.micro_batch_loss`.
"""

import functools
from collections.abc import Callable

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.logging_utils import init_logger
from openrlhf.utils.loss_utils import get_loss_batch_info
from torch import Tensor
from tqdm import tqdm

from arlopti_openrlhf import learning_rate, methods, token_method
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import mini_batches, old_log_probs, optimizer_steps, partition, token_weights
from arlopti_openrlhf.update.checkpointing import Checkpointing
from arlopti_openrlhf.update.metrics import (
    PassMetrics,
    UpdateMetrics,
    micro_batch_status,
    rollout_gap,
    statistics_metrics,
)
from arlopti_openrlhf.update.mini_batches import MiniBatch
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample
from arlopti_openrlhf.update.step import (
    MicroBatch,
    Objective,
    Result,
    Weighed,
    micro_batch_loss,
    policy_forward,
    selection,
)
from arlopti_openrlhf.update.token_statistics import UpdateStatistics, token_updates

logger = init_logger(__name__)


class TokenUpdateTrainer(ppo_actor.ActorPPOTrainer):
    """`ActorPPOTrainer` with token methods, among them AR (Eq. 4) and Lopti (Algorithm 1, lines 11-19).

    A method gives a weight to each token, in one or several passes. A pass takes one optimizer step on the tokens of a
    mini-batch that have a weight. What follows from that:
    1. With Lopti two steps are taken where upstream takes one. So the learning-rate schedule spans twice the steps.
       EMA's decay and the coefficient of the MoE loss apply at every step, so the passes share them.
    2. A pass without a token on any rank takes no step.
    3. With a `SelectiveActor` a pass computes only the tokens that it updates. The samples of a prompt stay together,
       the first pass gives log π_old, and idle responses, which have no gradient, are not computed.
    4. LoRA's weights are sent to vLLM merged.

    Without a method on upstream's actor, upstream's loop trains. With the statistics off too, nothing of ours runs.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.methods = token_method.load(*methods.requested(self.args.algo))
        token_weights.check_entropies(self.methods, self.actor)
        self.is_selective = isinstance(self.actor, SelectiveActor)
        self.observes = self.args.logger.probability_stats != "off"
        self.is_off = not (self.methods or self.is_selective or self.observes)
        has_other_gradients = self.args.algo.kl.use_loss or self.args.actor.entropy_coef is not None
        self.lays_out = self.is_selective and not self.actor.is_vlm and self.strategy.ring_attn_group is None
        self.checkpointing = Checkpointing(self.actor.model.module, self.args)
        self.skips_idle = self.is_selective and not has_other_gradients
        self.has_reported = False  # what the selective update saves
        self.ranks = Ranks(self.strategy)
        # Of the rollout batch that is being trained. Upstream's loop calls `training_step`, which reads them here.
        self.statistics: UpdateStatistics | None = None
        self.steps_before = 0
        normalizes = self.args.algo.token_method_normalize
        self.token_weights = token_weights.TokenWeights(self.methods, self.actor_loss_fn.token_level_loss, normalizes)
        # What counts optimizer steps is shared out between the passes. At equal data the learning rate, the average of
        # the weights and the balancing loss are those of one pass.
        self.passes = len(self.token_weights.labels)
        learning_rate.stretch(self.actor_scheduler, self.passes)
        self.ema_beta **= 1 / self.passes
        self.aux_loss_coef = self.args.actor.aux_loss_coef / self.passes if self.aux_loss else None
        balances_experts_in_groups = self.aux_loss and any(method.groups for method in self.methods)
        can_defer = self.is_selective and old_log_probs.can_defer(self.args, self.actor, balances_experts_in_groups)
        self.first_pass_gives_old_log_probs = can_defer and not self.token_weights.needs_rollout_batch
        # The forward pass that gives π_old gives the entropies too, which upstream's experience maker has no room for.
        self.defers_old_log_probs = self.first_pass_gives_old_log_probs or (
            self.token_weights.needs_entropies and not old_log_probs.in_the_reward(self.args)
        )

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer, as upstream.

        Returns:
            Upstream's metrics. Those of a pass appear under its name where there are several, as `lopti/low/...` and
            `lopti/high/...`; `policy_loss`, `kl` and `entropy_loss` also as the sum of all (except GSPO's loss, which
            is the sequences' in each). What token methods log of their weights (`Method.metrics`), as
            `ar/mean_weight` and `token_method/...`. The statistics by probability as `tokens/...`
            (`UpdateStatistics.metrics`). `skipped_optimizer_steps` counts the refused ones (`ops.health.guard`), and
            `rollout/gap` compares vLLM's log-probs with the actor's.
        """
        engine = self.actor.model
        skipped, self.steps_before = engine.skipped_steps, engine.global_steps
        if self.observes:
            by_quartile = self.args.logger.probability_stats == "quartiles"
            self.statistics = UpdateStatistics(torch.cuda.current_device(), by_quartile)
        status = self._train(kl_ctl) if self.methods or self.is_selective else super().ppo_train(kl_ctl)
        if self.statistics is not None:
            # GSPO's gradient is spread over the response.
            is_known = self.args.actor.policy_loss_type != "gspo"
            before = token_method.name_of_reweighting(self.methods) if is_known else None
            status |= statistics_metrics(self.statistics, self.ranks, before)
        status |= {"skipped_optimizer_steps": engine.skipped_steps - skipped}
        return status | rollout_gap(self.replay_buffer.items, self.ranks)

    def _train(self, kl_ctl: float) -> dict[str, float]:
        """Train on each mini-batch in each pass."""
        samples = [Sample(**vars(item)) for item in self.replay_buffer.items]
        self.replay_buffer.items = [*samples]
        known = self.token_weights.knows_nothing
        if not self.first_pass_gives_old_log_probs:
            known = self.token_weights.look_at_all(self.actor, samples, self.args, self.ranks)
        elif not self.methods:
            self.token_weights.weigh(samples)  # for which nothing has to be known
        metrics, trained = UpdateMetrics(self.args), []
        for epoch in range(self.max_epochs):
            batches = self._mini_batches(samples)
            order = mini_batches.in_order(batches, self.passes, self.args.algo.lopti.scope)
            trained = [sample for mini_batch in batches for sample in mini_batch.samples]
            # The first pass gives π_old of its own samples. That of the others is computed before θ moves. A later
            # epoch has another order, and may train on samples that fill no mini-batch in this one.
            is_deferred = self.first_pass_gives_old_log_probs and epoch == 0 and bool(order)
            if is_deferred:
                self._learn_old_log_probs(trained if self.max_epochs == 1 else samples, order[0][0])
            bar = tqdm(
                order, desc=f"Train epoch [{epoch + 1}/{self.max_epochs}]", disable=not self.strategy.is_rank_0()
            )
            for i, (mini_batch, index) in enumerate(bar):
                trained_pass = self._train_pass(mini_batch, index, kl_ctl, is_deferred and i == 0)
                metrics.add(self.token_weights.labels[index], *trained_pass)
            if self.statistics is not None and self.methods:
                self.statistics.add_left_out(self.token_weights.left_out(trained))
        return metrics.summary() | self.token_weights.metrics(trained, known, self.ranks)

    def _mini_batches(self, samples: list[Sample]) -> list[MiniBatch]:
        """Return this rank's mini-batches of one epoch, and say once how many tokens are computed."""
        batches, limit = mini_batches.divide(
            samples, self.actor, self.replay_buffer, self.strategy, self.ranks, self.checkpointing
        )
        if self.is_selective and not self.has_reported and batches and self.strategy.is_rank_0():
            self.has_reported = True
            report = partition.describe(batches[0].micro_batches, limit)
            if self.args.actor.gradient_checkpointing_enable:
                report += f"; gradient checkpointing: {self.checkpointing.level}"
            logger.info(f"selective update, first mini-batch of this rank: {report}")
        return batches

    def _learn_old_log_probs(self, samples: list[Sample], first: MiniBatch) -> None:
        """Compute log π_old of all samples but those of the first mini-batch whose forward will give it."""
        given = [sample for sample in first.samples if not self._is_idle(sample.advantages)]
        rest = [sample for sample in samples if not any(sample is other for other in given)]
        with_entropies = self.token_weights.needs_entropies
        old_log_probs.compute(self.actor, rest, self.args, self.ranks, with_distributions=with_entropies)
        self.token_weights.weigh(rest)

    def _train_pass(
        self, mini_batch: MiniBatch, index: int, kl_ctl: float, gives_old_log_probs: bool
    ) -> tuple[float, dict[str, float]]:
        """Take one optimizer step. Return the tokens that it updates and the metrics, of all ranks.

        A pass without a token takes no step. One that gives π_old learns only on its way that it has none.
        """
        engine, samples, weights = self.actor.model, mini_batch.samples, self.token_weights
        # DeepSpeed divides each loss by this number, however many micro-batches there are. EMA counts them.
        divisor = engine.gradient_accumulation_steps()
        gives_weights = gives_old_log_probs and bool(self.methods)
        num_tokens = None if gives_weights else weights.count(samples, index, self.ranks)
        if num_tokens == 0:
            optimizer_steps.pass_over(engine, self.actor_scheduler)
            self._average_weights(divisor)
            return 0, {}
        tokens, responses = self.ranks.sum(*weights.denominators(samples, index))
        metrics, learned = PassMetrics(divisor), []
        for i, micro_batch in enumerate(mini_batch.micro_batches, 1):
            is_last = i == len(mini_batch.micro_batches)
            # Left alone, DeepSpeed takes each `gradient_accumulation_steps` micro-batches for a mini-batch. OpenRLHF
            # sets that to 1 for dynamic batches, and ZeRO-2 would keep the gradient of the last micro-batch alone.
            engine.set_gradient_accumulation_boundary(is_last)
            experience = make_experience_batch(micro_batch, self.args.ds.packing_samples)
            response = experience.action_mask
            weighed = Weighed.of(response, response) if gives_weights else weights.of(micro_batch, index)
            is_idle = self._is_idle(experience.advantages)
            selected = selection(response, weighed.group, is_idle, self.args.actor.policy_loss_type)
            layout = None
            if self.lays_out:
                layout = self.actor.lay_out(experience.sequences, selected, experience.attention_mask, self.aux_loss)
            denominators = get_loss_batch_info(
                self.strategy, response, batch_num_tokens=tokens / divisor, global_batch_size=responses / divisor
            )
            share = divisor * len(micro_batch) / len(samples)
            batch = MicroBatch(experience, weighed, selected, layout, gives_old_log_probs, denominators, share)
            weigh = functools.partial(weights.learn, micro_batch, index) if gives_weights else None
            result = self._backward(batch.to(torch.cuda.current_device()), kl_ctl, weigh)
            if gives_old_log_probs and not gives_weights:
                learned.append((micro_batch, result.old_log_probs))
            if is_last and num_tokens is None:
                num_tokens = weights.count(samples, index, self.ranks)
            if is_last and not num_tokens:
                optimizer_steps.skip(engine, self.actor_scheduler)
                self._average_weights(divisor)
            figures = self._optimizer_step(divisor) if is_last and num_tokens else self._learning_rate()
            metrics.add(micro_batch_status(experience, result.logged, figures, float(len(result.weighed.places))))
        optimizer_steps.count(engine)
        # Now that all micro-batches are under way the host may wait for them.
        for micro_batch, log_probs in learned:
            old_log_probs.store(micro_batch, log_probs)
        return num_tokens or 0, metrics.reduce(self.ranks)

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None
    ) -> dict:
        """Take a micro-batch of upstream's loop, which trains without a method on upstream's actor.

        The gradient and the metrics are upstream's bit for bit. The statistics by probability come with them.
        """
        if self.is_off:
            return super().training_step(experience, kl_ctl, step, loss_batch_info)
        buffer, response, is_dynamic = self.replay_buffer, experience.action_mask, self.replay_buffer.dynamic_batch
        if loss_batch_info is None:
            loss_batch_info = get_loss_batch_info(
                self.strategy, response, replay_buffer=buffer, step=step, dynamic_batch=is_dynamic
            )
        share = buffer.dynamic_sample_loss_scale[step] if is_dynamic else 1.0
        weighed = Weighed.of(torch.ones_like(experience.advantages), response)
        batch = MicroBatch(experience, weighed, response, None, False, loss_batch_info, share)
        result = self._backward(batch, kl_ctl, None)
        # DeepSpeed and EMA count all micro-batches but dynamic ones.
        steps = not is_dynamic or buffer.dynamic_optimizer_step[step]
        figures = self._optimizer_step(1) if steps else self._learning_rate()
        return micro_batch_status(experience, result.logged, figures, float(response.sum()))

    def _backward(self, batch: MicroBatch, kl_ctl: float, weigh: Callable | None) -> Result:
        """Take a micro-batch through the step, and add its gradient to that of the others."""
        gives_entropies = batch.gives_old_log_probs and self.token_weights.needs_entropies
        forward = functools.partial(
            policy_forward,
            self.actor,
            ring_attn_group=self.strategy.ring_attn_group,
            with_entropy=self.args.actor.entropy_coef is not None,
            with_statistics=self.statistics is not None or gives_entropies,
            with_aux_loss=self.aux_loss,
        )
        self.actor.train()
        objective = Objective(self.actor_loss_fn, self.args, kl_ctl, self.aux_loss_coef)
        result = micro_batch_loss(forward, objective, batch, weigh)
        if self.statistics is not None:
            updates = token_updates(
                result.loss,
                result.log_probs,
                result.policy_log_probs,
                old_log_probs=result.old_log_probs,
                advantages=batch.experience.advantages,
                token_weights=result.weighed.weights,
                places=result.weighed.places,
                selected=batch.selected,
                distributions=result.output.statistics,
                # The loss is a mean over the optimizer step's tokens, times the ranks.
                num_tokens=batch.denominators["batch_num_tokens"] / batch.denominators["dp_size"],
            )
            self.statistics.add(updates, is_moved=self.actor.model.global_steps > self.steps_before)
        self.strategy.backward(result.loss, self.actor, self.actor_optim)
        return result

    def _is_idle(self, advantages: Tensor) -> Tensor:
        """Return (...,) whether nothing in a response with these advantages (..., A) has a gradient."""
        return (advantages == 0).all(dim=-1) if self.skips_idle else torch.zeros_like(advantages[..., 0]).bool()

    def _optimizer_step(self, micro_batches: int) -> dict[str, float]:
        """Step the optimizer and average the weights, as so many micro-batches count. Return what is logged."""
        self.strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
        self._average_weights(micro_batches)
        return self._learning_rate() | {"actor_grad_norm": self.strategy.get_grad_norm(self.actor)}

    def _learning_rate(self) -> dict[str, float]:
        return {"actor_lr": self.actor_scheduler.get_last_lr()[0]}

    def _average_weights(self, micro_batches: int) -> None:
        """Let EMA count so many micro-batches. It averages once for each `gradient_accumulation_steps` of them."""
        if self.ema_model:
            for _ in range(micro_batches):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
