"""Trains the policy on a rollout batch, in the passes of its token methods.

docs/architecture.md walks through it. One micro-batch's way is `micro_batch.MicroBatchTrainer.training_step`.
"""

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.utils.logging_utils import init_logger
from openrlhf.utils.loss_utils import get_loss_batch_info
from tqdm import tqdm

from arlopti_openrlhf.update import lora, old_log_probs, optimizer_steps, partition, passes, token_weights
from arlopti_openrlhf.update.metrics import PassMetrics, UpdateMetrics, rollout_gap
from arlopti_openrlhf.update.micro_batch import MicroBatchTrainer
from arlopti_openrlhf.update.passes import MiniBatch, Pass, Place
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS, UpdateStatistics

logger = init_logger(__name__)


class TokenUpdateTrainer(MicroBatchTrainer):
    """`ActorPPOTrainer` with token methods, among them AR (Eq. 4) and Lopti (Algorithm 1, lines 11-19).

    A method gives a weight to each token, in one or several passes. A pass takes one optimizer step on the tokens of a
    mini-batch that have a weight. What follows from that:
    1. With Lopti two steps are taken where upstream takes one. So the learning-rate schedule spans twice the steps.
       EMA's decay and the coefficient of the MoE loss apply at every step, so the passes share them.
    2. A pass without a token on any rank takes no step.
    3. With a `SelectiveActor` a pass computes only the tokens that it updates. The samples of a prompt stay together,
       the first pass gives log π_old, and idle responses, which have no gradient, are not computed.
    4. LoRA's weights are sent to vLLM merged.

    With all methods, the selective actor and the statistics off, upstream's code runs unchanged.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        balances_experts_in_groups = self.aux_loss and any(method.groups for method in self.methods)
        self.has_reported = False  # what the selective update saves
        can_defer = self.is_selective and old_log_probs.can_defer(self.args, self.actor, balances_experts_in_groups)
        needs_all = self.token_weights.normalizes or any(m.needs_rollout_batch for m in self.methods)
        self.first_pass_gives_old_log_probs = can_defer and not needs_all
        # The forward pass that gives π_old gives the entropies too, which upstream's experience maker has no room for.
        computes_entropies = token_weights.reads_entropies(self.methods, self.actor)
        self.defers_old_log_probs = self.first_pass_gives_old_log_probs or (
            computes_entropies and not old_log_probs.in_the_reward(self.args)
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
        skipped = engine.skipped_steps
        status = super().ppo_train(kl_ctl) if self.is_off else self._update(kl_ctl)
        status |= {"skipped_optimizer_steps": engine.skipped_steps - skipped}
        return status | rollout_gap(self.replay_buffer.items, self.ranks)

    def _update(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer in passes, or by upstream's loop where there is no method."""
        if self.observes:
            by_quartile = self.args.logger.probability_stats == "quartiles"
            self.statistics = UpdateStatistics(torch.cuda.current_device(), by_quartile)
        items = self.replay_buffer.items
        self.token_weights = self.token_weights.of_the_next()
        if self.methods and not self.first_pass_gives_old_log_probs:
            self.token_weights.look_at_all(self.actor, items, self.args, self.ranks)
        if self.methods or (self.is_selective and self._fills_mini_batches()):
            status, items = self._train_in_passes(kl_ctl)
        else:
            if self.defers_old_log_probs:
                old_log_probs.compute(self.actor, items, self.args, self.ranks)
            status = super().ppo_train(kl_ctl)
        return status | self.token_weights.metrics(items, self.ranks) | self._statistics_metrics()

    def _train_in_passes(self, kl_ctl: float) -> tuple[dict[str, float], list[Experience]]:
        """Train on each mini-batch in each pass; return the metrics and the samples that were trained on."""
        metrics, trained = UpdateMetrics(self.args), []
        for epoch in range(self.max_epochs):
            order = passes.in_order(mini_batches := self._mini_batches(), self.passes, self.args.algo.lopti.scope)
            trained = [sample for mini_batch in mini_batches for sample in mini_batch.samples]
            # The first pass gives π_old of its own samples. That of the others is computed before θ moves. A later
            # epoch is shuffled anew, and may train on samples that fill no mini-batch in this one.
            is_deferred = self.first_pass_gives_old_log_probs and epoch == 0 and bool(order)
            if is_deferred:
                first = set(map(id, order[0][0].samples))
                needed = trained if self.max_epochs == 1 else self.replay_buffer.items
                rest = [item for item in needed if id(item) not in first or self.is_idle(item.advantages)]
                old_log_probs.compute(self.actor, rest, self.args, self.ranks, self.token_weights.distributions)
            bar = tqdm(
                order, desc=f"Train epoch [{epoch + 1}/{self.max_epochs}]", disable=not self.strategy.is_rank_0()
            )
            for i, (mini_batch, index) in enumerate(bar):
                this_pass = Pass(index, gives_old_log_probs=is_deferred and i == 0)
                if not (this_pass.gives_old_log_probs or self.token_weights.count(mini_batch, index, self.ranks)):
                    self._skip_pass()
                    continue
                status = self._train_pass(mini_batch, this_pass, kl_ctl)
                (num_tokens,) = self.ranks.sum(this_pass.num_tokens)
                if num_tokens:
                    metrics.add(self.token_weights.labels[index], num_tokens, status)
            if self.statistics is not None and self.methods:
                self.statistics.add_left_out(self.token_weights.left_out(trained))
        return metrics.summary(), trained

    def _skip_pass(self) -> None:
        """Count a pass without an optimizer step, as the schedule and EMA count data."""
        optimizer_steps.pass_over(self.actor.model, self.actor_scheduler)
        self.average_weights(self.actor.model.gradient_accumulation_steps())

    def _train_pass(self, mini_batch: MiniBatch, this_pass: Pass, kl_ctl: float) -> dict[str, float]:
        """Take the micro-batches of one optimizer step through `training_step`; return the metrics of all ranks."""
        engine, samples = self.actor.model, mini_batch.samples
        # DeepSpeed divides each loss by this number, however many micro-batches there are.
        divisor = engine.gradient_accumulation_steps()
        tokens, responses = self.ranks.sum(*self.token_weights.denominators(samples, this_pass.index))
        metrics = PassMetrics(divisor)
        for i, micro_batch in enumerate(mini_batch.micro_batches):
            experience = make_experience_batch(micro_batch, self.args.ds.packing_samples)
            experience.to_device(torch.cuda.current_device())
            is_last = i == len(mini_batch.micro_batches) - 1
            place = Place(is_last, divisor * len(micro_batch) / len(samples), counts=divisor * is_last)
            loss_batch_info = get_loss_batch_info(
                self.strategy,
                experience.action_mask,
                batch_num_tokens=tokens / divisor,
                global_batch_size=responses / divisor,
            )
            optimizer_steps.announce(engine, place)
            metrics.add(self.training_step(experience, kl_ctl, i, loss_batch_info, this_pass, place, micro_batch))
        optimizer_steps.count(engine, place)
        return metrics.reduce(self.ranks)

    def _mini_batches(self) -> list[MiniBatch]:
        """Return this rank's mini-batches of one epoch, in micro-batches that share prompts where the model can."""
        items, size, args = self.replay_buffer.items, self._mini_batch_size(), self.args
        reason = self._reason_not_to_share()
        if reason is None:
            longest = self.ranks.max(max((len(item.sequences) for item in items), default=0))
            costliest = self.ranks.max(max(map(partition.cost, partition.by_prompt(items)), default=0))
            budget = partition.token_budget(args, self.actor.hf_config, longest, costliest)
            # Upstream shuffles, but not dynamic batches.
            samples = passes.mini_batches(items, size, not args.train.dynamic_batch_enable, self.ranks)
            mini_batches = [passes.by_cost(mini_batch, budget, self.ranks) for mini_batch in samples]
        elif args.train.dynamic_batch_enable:
            self.replay_buffer.setup_dynamic_batch(self.strategy)
            mini_batches = passes.dynamic_mini_batches(self.replay_buffer, size)
        else:
            is_sharded = self.strategy.ring_attn_group is not None or args.ds.tensor_parallel_size > 1
            samples = passes.mini_batches(items, size, not is_sharded, self.ranks)
            mini_batches = [
                passes.by_count(mini_batch, self.replay_buffer.sample_batch_size) for mini_batch in samples
            ]
        if self.is_selective and not self.has_reported and mini_batches and self.strategy.is_rank_0():
            self.has_reported = True
            report = partition.describe(mini_batches[0].micro_batches, budget if reason is None else reason)
            logger.info(f"selective update, first mini-batch of this rank: {report}")
        return mini_batches

    def _reason_not_to_share(self) -> str | None:
        """Return why the ranks do not share prompts, or None where they do. A collective call."""
        if not self.is_selective:
            return "the update is OpenRLHF's"
        if self.actor.is_vlm:
            return "vision models are computed as OpenRLHF does"
        if self.aux_loss:
            return "the experts' balancing loss counts every token (--actor.aux_loss_coef)"
        lengths = [len(item.sequences) for item in self.replay_buffer.items]
        longest = self.replay_buffer.items[lengths.index(max(lengths))] if lengths else old_log_probs.stand_in()
        reason = self.actor.check(longest.sequences[None].to(torch.cuda.current_device())).reason_not_to_share
        return None if self.ranks.min(reason is None) else reason or "another rank's model does not"

    def _mini_batch_size(self) -> int:
        return self.args.train.batch_size // self.ranks.count

    def _fills_mini_batches(self) -> bool:
        """Return whether this rollout batch is a number of whole mini-batches, on every rank, and begins with one.

        Upstream carries the micro-batches that fill none over to the next rollout batch's first optimizer step.
        """
        engine = self.actor.model
        rest = len(self.replay_buffer.items) % self._mini_batch_size()
        return not self.ranks.max(rest + engine.micro_steps % engine.gradient_accumulation_steps())

    def _statistics_metrics(self) -> dict:
        if self.statistics is None:
            return {}
        if self.statistics.by_quartile:
            log_probs = self.statistics.log_probs()[None]
            self.statistics.set_quartiles(self.ranks.quantiles(log_probs, [0.25, 0.5, 0.75]))
        self.statistics.sums = self.ranks.sum_tensor(self.statistics.sums)
        histograms = self.ranks.sum_tensor(self.statistics.histograms)
        # GSPO's gradient is spread over the response, and some methods leave out tokens whose gradient nobody knows.
        is_known = self.args.actor.policy_loss_type != "gspo" and not self.ranks.max(self.statistics.lacks_tokens)
        reweighting = [method for method in self.methods if not method.groups]
        is_one = len(reweighting) == 1 and reweighting[0].has_metrics
        before = (reweighting[0].name if is_one else "methods") if is_known and reweighting else None
        by_bin = self.statistics.metrics(before)
        return by_bin | dict(zip(HISTOGRAMS, histograms.tolist(), strict=True))

    def broadcast_to_vllm(self) -> None:
        """Send the weights to vLLM, as upstream; a LoRA model's are sent merged, under its base model's names."""
        if not self.args.ds.lora.rank:
            return super().broadcast_to_vllm()
        with lora.merged_parameters(self.actor.model.module, gathered=self.args.ds.zero_stage == 3):
            super().broadcast_to_vllm()
