"""Token methods on OpenRLHF's own update loop, in one class. Read this first: it defines what the package computes.

A token method (`methods/`) gives each response token a weight in each of its passes. AR has one pass, with the weights
α · π_old + 1 − α (Eq. 4). Lopti has two, 1[π_old < η] and 1[π_old ≥ η] (Algorithm 1, lines 14-19). In a pass each
mini-batch takes an optimizer step: advantages are multiplied by the weights, and tokens of weight 0 stay as they are.
`update/` computes the same gradients faster, but not for vision models, ring attention, tensor parallelism and
DeepCompile. There this class trains, as with `--actor.update stock`.
"""

from functools import partial
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, split_experience_batch
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.loss_utils import get_loss_batch_info

from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.update import optimizer_steps
from arlopti_openrlhf.update.metrics import UpdateMetrics
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample
from arlopti_openrlhf.update.settings import Settings
from arlopti_openrlhf.update.token_weights import TokenWeights


class ReferenceTrainer(ActorPPOTrainer):
    """`ActorPPOTrainer` that trains on a rollout batch in the passes of token methods.

    Raises:
        ValueError: a method or setting needs the selective update, such as methods that read entropies.
    """

    settings: Any = None  # `Settings`; those of the flags if a subclass has none of its own

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings or Settings.of(self.args)
        methods = settings.load_methods(self.args, is_selective=False)
        self.token_weights = TokenWeights(methods, self.actor_loss_fn.token_level_loss, settings.normalizes)
        self.ranks = Ranks(self.strategy)
        optimizer_steps.share_among_passes(self, len(self.token_weights.labels))
        self.epochs = self.args.train.max_epochs
        self.max_epochs = 1  # upstream's loop runs once for each pass of each epoch
        # What upstream's loop does not hand to `training_step`: the pass, what its methods know of the rollout batch,
        # and how many tokens it has updated, of this mini-batch on this rank, and in all on all ranks.
        self.index, self.known, self.updated, self.total = 0, self.token_weights.knows_nothing, 0, 0.0

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the replay buffer in each pass (Algorithm 1, lines 11-19).

        Returns:
            Upstream's metrics, those of a pass under its name, as `lopti/low/policy_loss`, and the weights' own.
        """
        items, size = self.replay_buffer.items, self.args.train.batch_size // self.ranks.count
        is_dynamic = self.args.train.dynamic_batch_enable  # then mini-batches are whole by themselves
        items = items if is_dynamic else optimizer_steps.whole_mini_batches(items, size, self.ranks)
        samples = [Sample(**vars(item)) for item in items]
        self.known = self.token_weights.learn(samples, self.ranks)
        metrics, step = UpdateMetrics(self.args), partial(self._step_unless_empty, self.strategy.optimizer_step)
        whole = replaced_attribute(self.replay_buffer, "items", items)
        with whole, replaced_attribute(self.strategy, "optimizer_step", step):
            for _ in range(self.epochs if items or is_dynamic else 0):  # upstream's loop shuffles no empty buffer
                order = torch.get_rng_state()
                for index, label in enumerate(self.token_weights.labels):
                    torch.set_rng_state(order)  # all passes have the same mini-batches
                    self.index, self.total = index, 0.0
                    status = super().ppo_train(kl_ctl)
                    metrics.add(label, self.total, status)
        weights = [self.token_weights.of(sample, self.known) for sample in samples]
        return metrics.summary() | self.token_weights.metrics(weights, self.known, self.ranks)

    def training_step(self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None):
        """Take upstream's step on the tokens that the pass updates. Denominators stay those of the whole response."""
        response, loss, buffer = experience.action_mask, self.actor_loss_fn, self.replay_buffer
        info = loss_batch_info or get_loss_batch_info(
            self.strategy, response, replay_buffer=buffer, step=step, dynamic_batch=True
        )
        samples = [Sample(**vars(item)) for item in split_experience_batch(experience)]
        weights = [self.token_weights.of(sample, self.known) for sample in samples]
        factors = torch.stack([own.factors[self.index] for own in weights]).to(response.device)
        updated = torch.stack([own.updated[self.index] for own in weights]).to(response.device)
        self.updated += int(updated.sum())
        if buffer.dynamic_batch:  # else ZeRO-2 keeps only the gradient of the last micro-batch
            self.actor.model.set_gradient_accumulation_boundary(bool(buffer.dynamic_optimizer_step[step]))

        def pass_loss(log_probs, old_log_probs, advantages, action_mask, **rest):
            # Other tokens are constants. GSPO's ratio, the sequence's, has theirs too; elsewhere their advantage is 0.
            experience.action_mask = updated.to(response.dtype)  # for upstream's KL and entropy terms, which follow
            is_gspo = loss.policy_loss_type == "gspo"
            constants = log_probs.detach() if is_gspo else old_log_probs
            advantages = advantages * factors * (1 if is_gspo else updated)  # Eq. 4: AR's factors
            log_probs = torch.where(updated, log_probs, constants)
            return loss(log_probs, old_log_probs, advantages, action_mask=action_mask, **rest)

        with replaced_attribute(self, "actor_loss_fn", pass_loss):
            status = super().training_step(experience, kl_ctl, step, info)
        if not updated.any():  # upstream's means over no token are NaN
            values = {n: torch.as_tensor(value).nan_to_num() for n, value in status["metrics"].items()}
            status["metrics"] = {n: value.tolist() if value.ndim == 0 else value for n, value in values.items()}
        return status | {"num_action_tokens": float(response.sum()) or 1e-9}  # upstream divides by their sum

    def _step_unless_empty(self, take_step, optimizer, actor, scheduler, **kwargs) -> None:
        """Take no step on a mini-batch without a token to update on any rank: momentum would move θ."""
        if actor.model.is_gradient_accumulation_boundary():
            (updated,), self.updated = self.ranks.sum(self.updated), 0
            self.total += updated
            if not updated:
                return optimizer_steps.skip(actor.model, scheduler)
        return take_step(optimizer, actor, scheduler, **kwargs)
