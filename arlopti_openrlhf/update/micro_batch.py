"""The life of a micro-batch, from its tokens to its part of an optimizer step (docs/architecture.md)."""

from collections.abc import Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf import learning_rate, methods, token_method
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import old_log_probs, optimizer_steps
from arlopti_openrlhf.update.group_loss import group_policy_loss
from arlopti_openrlhf.update.metrics import micro_batch_status
from arlopti_openrlhf.update.passes import Pass, Place
from arlopti_openrlhf.update.penalties import add_penalties
from arlopti_openrlhf.update.policy_forward import policy_forward
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.token_statistics import UpdateStatistics, token_updates
from arlopti_openrlhf.update.token_weights import TokenWeights


class MicroBatchTrainer(ppo_actor.ActorPPOTrainer):
    """`ActorPPOTrainer` with a `training_step` that weighs the tokens.

    With all methods, the selective actor and the statistics off, upstream's code runs unchanged.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.is_selective = isinstance(self.actor, SelectiveActor)
        self.observes = self.args.logger.probability_stats != "off"
        self.methods = token_method.load(*methods.requested(self.args.algo))
        self.is_off = not (self.methods or self.is_selective or self.observes)
        has_other_gradients = self.args.algo.kl.use_loss or self.args.actor.entropy_coef is not None
        self.skips_idle = self.is_selective and not has_other_gradients
        self.ranks = Ranks(self.strategy)
        # Of the rollout batch that is being trained.
        self.statistics: UpdateStatistics | None = None
        normalizes = self.args.algo.token_method_normalize
        self.token_weights = TokenWeights(self.methods, self.actor_loss_fn.token_level_loss, normalizes)
        # What counts optimizer steps is shared out between the passes. At equal data the learning rate, the average of
        # the weights and the balancing loss are those of one pass.
        self.passes = len(self.token_weights.labels)
        learning_rate.stretch(self.actor_scheduler, self.passes)
        self.ema_beta **= 1 / self.passes
        self.aux_loss_coef = self.args.actor.aux_loss_coef / self.passes

    def training_step(
        self,
        experience: Experience,
        kl_ctl: float,
        step: int,
        loss_batch_info: dict | None = None,
        this_pass: Pass | None = None,
        place: Place | None = None,
        samples: Sequence[Experience] = (),
    ) -> dict:
        """Take one micro-batch through the update (Algorithm 1, lines 11-19), as upstream's `training_step`.

        It equals that bit for bit on upstream's actor without methods.

        Args:
            experience: the micro-batch, on the device.
            kl_ctl: coefficient of the KL loss.
            step: index of the micro-batch in its epoch.
            loss_batch_info: the denominators of the optimizer step; None takes them from the replay buffer.
            this_pass: the pass; None, from upstream's loop, is a pass over the whole response.
            place: where the micro-batch stands in its mini-batch; None, from upstream's loop, lets DeepSpeed count.
            samples: what the micro-batch was made of. Token methods and a pass that gives π_old need them.

        Returns:
            The micro-batch's metrics, in upstream's form (`micro_batch_status`).
        """
        if self.is_off:
            return super().training_step(experience, kl_ctl, step, loss_batch_info)
        self.actor.train()
        this_pass, place = (
            this_pass or Pass(),
            place or optimizer_steps.upstreams_place(self.actor.model, self.replay_buffer, step),
        )
        response, old = experience.action_mask, experience.action_log_probs  # (B, A)
        # The denominators are those of the whole response, whichever tokens the pass updates.
        loss_batch_info = loss_batch_info or optimizer_steps.upstreams_denominators(
            self.strategy, self.replay_buffer, step, response
        )

        # Which tokens are computed: those with a weight. Where π_old is not known yet, and for GSPO, whose ratio is
        # the sequence's, the whole response is. Idle responses have no gradient.
        weights = group = response
        if self.methods and not this_pass.gives_old_log_probs:
            weights, group = self._weights(samples, this_pass, old, response)
        wanted = response if self.args.actor.policy_loss_type == "gspo" else group
        selected = (wanted * ~self.is_idle(experience.advantages)[:, None]).to(response.dtype)

        # Forward: log π_θ of the selected tokens, 0 elsewhere.
        log_probs, output = self._forward(experience, selected, this_pass)

        # π_old: from this forward where nobody knows it yet. θ has not moved since the update began.
        if this_pass.gives_old_log_probs:
            old = experience.action_log_probs = old_log_probs.from_first_forward(log_probs, selected, old, response)
            old_log_probs.store(samples, old)
            self.token_weights.learn_entropies(samples, output)
            weights, group = self._weights(samples, this_pass, old, response)
        this_pass.num_tokens += (num_tokens := float(group.sum()))

        # The loss, of the weighted advantages. The policy loss reads its own view of the log-probs, so the derivative
        # by that view holds no KL.
        policy = group_policy_loss(
            self.actor_loss_fn,
            policy_log_probs := log_probs.view_as(log_probs),
            old,
            experience.advantages * weights,
            group=group,
            selected=selected,
            response=response,
            rollout_log_probs=experience.rollout_log_probs,
            loss_batch_info=loss_batch_info,
        )
        loss, penalties = add_penalties(
            policy.loss,
            log_probs,
            old,
            experience.base_action_log_probs,
            group=group,
            output=output,
            args=self.args,
            kl_ctl=kl_ctl,
            balancing=(self.aux_loss_coef, place.share) if self.aux_loss else None,
            loss_batch_info=loss_batch_info,
        )

        # Statistics of the tokens by probability, from derivatives through the loss alone.
        self._observe(loss, log_probs, policy_log_probs, output, experience, weights, group, selected, loss_batch_info)

        self.strategy.backward(loss, self.actor, self.actor_optim)
        figures = self._step_at_the_end(this_pass, place)
        return micro_batch_status(experience, policy.logged() | penalties, figures, num_tokens)

    def is_idle(self, advantages: Tensor) -> Tensor:
        """Return (...,) whether nothing in a response with these advantages (..., A) has a gradient."""
        return (advantages == 0).all(dim=-1) if self.skips_idle else torch.zeros_like(advantages[..., 0]).bool()

    def _weights(self, samples: Sequence[Experience], this_pass: Pass, old: Tensor, response: Tensor) -> tuple:
        """Return the factors of the advantages and the mask of the tokens that the pass updates, (B, A) each."""
        weights = self.token_weights.of(samples, this_pass.index, like=old)
        return weights, response * self.token_weights.updated(samples, this_pass.index, like=old)

    def _forward(self, experience: Experience, selected: Tensor, this_pass: Pass) -> tuple[Tensor, ModelOutput]:
        gives_entropies = this_pass.gives_old_log_probs and self.token_weights.distributions is not None
        return policy_forward(
            self.actor,
            experience,
            selected,
            ring_attn_group=self.strategy.ring_attn_group,
            with_entropy=self.args.actor.entropy_coef is not None,
            with_statistics=self.statistics is not None or gives_entropies,
            with_aux_loss=self.aux_loss,
        )

    def _observe(
        self, loss, log_probs, policy_log_probs, output, experience, weights, group, selected, loss_batch_info
    ) -> None:
        """Add what the loss does to the tokens of the group to the rollout batch's statistics, if they are taken."""
        if self.statistics is None:
            return
        self.statistics.add(
            token_updates(
                loss,
                log_probs,
                policy_log_probs,
                old_log_probs=experience.action_log_probs,
                advantages=experience.advantages,
                ar_weights=weights,
                group=group,
                selected=selected,
                distributions=output.statistics,
                # The loss is a mean over the optimizer step's tokens, times the ranks.
                num_tokens=loss_batch_info["batch_num_tokens"] / loss_batch_info["dp_size"],
            )
        )

    def _step_at_the_end(self, this_pass: Pass, place: Place) -> dict[str, float]:
        """Step the optimizer and average the weights where the mini-batch ends. Return the figures of the step.

        A pass that gives π_old learns only here that its group is empty on every rank, and takes no step then.
        """
        engine, strategy = self.actor.model, self.strategy
        if not place.counts:
            return {"actor_lr": self.actor_scheduler.get_last_lr()[0]}
        if place.ends_mini_batch and this_pass.gives_old_log_probs and not self.ranks.sum(this_pass.num_tokens)[0]:
            optimizer_steps.skip(engine, self.actor_scheduler)
        else:
            strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
            if place.ends_mini_batch and self.statistics is not None:
                self.statistics.is_moved = True
        self.average_weights(place.counts)
        return {
            "actor_lr": self.actor_scheduler.get_last_lr()[0],
            "actor_grad_norm": strategy.get_grad_norm(self.actor),
        }

    def average_weights(self, counts: int) -> None:
        """Let EMA count so many micro-batches. It averages once for each `gradient_accumulation_steps` of them."""
        if self.ema_model:
            for _ in range(counts):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
