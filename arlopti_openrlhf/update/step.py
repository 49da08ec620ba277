"""The step of a micro-batch: its forward pass, its weights, its loss, and what the loss does to its tokens."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.models import Actor, PolicyLoss, aggregate_loss
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.loss_utils import get_loss_batch_info
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from torch import Tensor
from transformers.utils import ModelOutput

from arlopti_openrlhf import token_method
from arlopti_openrlhf.forward.lm_head import statistics_of_logits
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.forward.transfer import on_device
from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.metrics import micro_batch_status
from arlopti_openrlhf.update.mini_batches import MiniBatch
from arlopti_openrlhf.update.sample import MicroBatch, PassWeights
from arlopti_openrlhf.update.settings import Settings, needs_stock_update
from arlopti_openrlhf.update.token_statistics import TokenUpdates, UpdateStatistics
from arlopti_openrlhf.update.token_weights import TokenWeights


class StepTrainer(ppo_actor.ActorPPOTrainer):
    """`ActorPPOTrainer` whose `training_step` gives each token a weight, and keeps statistics by probability."""

    settings: Any = None  # `Settings`; those of the flags if a subclass has none of its own

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings = self.settings or Settings.of(self.args)
        methods = token_method.load(settings.methods, settings.arguments)
        self.token_weights = TokenWeights(methods, self.actor_loss_fn.token_level_loss, settings.normalizes)
        readers = [method.name for method in methods if method.needs_entropies]
        if readers and not computes_selected(self.actor):
            raise ValueError(
                f"token methods that read entropies ({', '.join(readers)}) need the selective update of a text model"
            )
        # The command has refused these. A launcher of one's own has not.
        if isinstance(self.actor, SelectiveActor) and (flag := needs_stock_update(self.args)):
            raise ValueError(f"--{flag} needs OpenRLHF's own update: --actor.update stock, or install(update='stock')")
        batch, rollout = (
            self.args.train.batch_size,
            self.args.rollout.batch_size * self.args.rollout.n_samples_per_prompt,
        )
        if methods and batch > rollout:
            raise ValueError(f"--train.batch_size {batch}: a rollout batch has {rollout} samples, so no step is taken")
        others = [method.name for method in methods if method.name not in ("ar", "lopti")]
        if others and self.args.actor.policy_loss_type == "gspo":
            raise ValueError(f"token methods {', '.join(others)}: GSPO has one ratio for a sequence")
        # The passes share the experts' balancing loss.
        passes = len(self.token_weights.labels)
        self.aux_loss_coef = self.args.actor.aux_loss_coef / passes if self.aux_loss else None
        # Of the rollout batch that is being trained. Upstream's loop calls `training_step`, which reads them here.
        self.statistics: UpdateStatistics | None = None
        self.steps_before = 0

    def micro_batches(
        self, mini_batch: MiniBatch, index: int, totals: Sequence[float], gives_old_log_probs: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield a mini-batch's micro-batches in one pass. Each is made while the device works on the one before.

        Args:
            mini_batch: this rank's samples.
            index: of the pass.
            totals: the tokens that the loss divides by, and the responses with any, of all ranks.
            gives_old_log_probs: whether the forward gives π_old. Weights that are not known yet follow from it.
        """
        engine, args = self.actor.model, self.args
        # DeepSpeed divides each loss by this number, however many micro-batches there are.
        divisor = engine.gradient_accumulation_steps()
        tokens, responses = (total / divisor for total in totals)
        denominators = get_loss_batch_info(
            self.strategy, mini_batch.samples[0].action_mask, batch_num_tokens=tokens, global_batch_size=responses
        )
        for i, samples in enumerate(mini_batch.micro_batches, 1):
            # By itself DeepSpeed takes each `gradient_accumulation_steps` micro-batches for a mini-batch. OpenRLHF
            # sets that to 1 for dynamic batches, and ZeRO-2 would keep only the gradient of the last micro-batch.
            engine.set_gradient_accumulation_boundary(i == len(mini_batch.micro_batches))
            experience = make_experience_batch(samples, args.ds.packing_samples)
            weights, layout, wanted = None, None, experience.action_mask
            if all(sample.weights is not None for sample in samples):
                weights = PassWeights.of_samples(samples, index)
                # GSPO's ratio is the sequence's, so it needs the whole response.
                wanted = wanted if args.actor.policy_loss_type == "gspo" else weights.updated
            selected = (wanted * ~is_idle(experience.advantages, self.actor, args)[:, None]).to(wanted.dtype)
            if computes_selected(self.actor, self.strategy.ring_attn_group):
                layout = self.actor.lay_out(experience.sequences, selected, experience.attention_mask, self.aux_loss)
            batch = MicroBatch(
                **vars(experience),
                weights=weights,
                selected=selected,
                layout=layout,
                denominators=denominators,
                share=divisor * len(samples) / len(mini_batch.samples),
                gives_old_log_probs=gives_old_log_probs,
                samples=samples,
                pass_index=index,
            )
            yield batch.to(torch.cuda.current_device())

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None
    ) -> dict:
        """Add the gradient of a micro-batch to that of the others. Every pass of every method takes this step.

        Upstream's loop, which trains without a method on upstream's actor, calls it with its own micro-batches. Their
        gradients and metrics are upstream's bit for bit, and the optimizer steps as there.
        """
        if not isinstance(experience, MicroBatch):
            return self._step_of_upstreams_loop(experience, kl_ctl, step, loss_batch_info)
        batch = experience
        log_probs, output = self._forward(batch)

        # In the first pass θ is π_old still, and the weights follow from it. π_old of what is not selected is known.
        if batch.gives_old_log_probs:
            old = torch.where(batch.selected.bool(), log_probs.detach(), batch.action_log_probs)
            batch.action_log_probs = old.masked_fill(~batch.action_mask.bool(), 0.0)
        weights = batch.weights or self._weigh(batch, output)

        # The loss of the tokens with a weight, the statistics of what it does to them, and backward.
        policy_log_probs = log_probs.view_as(log_probs)
        objective = self.actor_loss_fn, self.args, kl_ctl, self.aux_loss_coef
        loss, logged = micro_batch_loss(batch, weights, log_probs, policy_log_probs, output, *objective)
        if self.statistics is not None:
            updates = token_updates(loss, batch, weights, log_probs, policy_log_probs, output.statistics)
            self.statistics.add(updates, is_moved=self.actor.model.global_steps > self.steps_before)
        self.strategy.backward(loss, self.actor, self.actor_optim)
        return micro_batch_status(batch, logged, float(len(weights.places)))

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, ModelOutput]:
        """Return (B, A) log π_θ of the selected tokens with their graph, 0 elsewhere, and the model's output.

        Where statistics or methods need them, `output.statistics` are (B, A) entropies and Σ_{j≠o} P_j² of the
        distributions, without a gradient.
        """
        self.actor.train()
        learns_entropies = batch.gives_old_log_probs and self.token_weights.needs_entropies
        with_statistics = self.statistics is not None or learns_entropies
        options: dict = {"return_entropy": self.args.actor.entropy_coef is not None}
        if batch.layout is not None:
            options |= {"return_statistics": with_statistics, "return_aux_loss": self.aux_loss, "layout": batch.layout}
        if batch.mm_train_inputs and self.actor.is_vlm:
            options |= merge_mm_train_inputs(batch.mm_train_inputs, batch.sequences.device)
        log_probs, output = self.actor(
            batch.sequences,
            batch.selected,
            attention_mask=batch.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            packed_seq_lens=None,
            **options,
        )
        if with_statistics and batch.layout is None:
            packs, tokens = self.actor.packing_samples, (batch.sequences, batch.selected, batch.attention_mask)
            output.statistics = statistics_of_logits(output["logits"], *tokens, packed=packs)
        return log_probs, output

    def _weigh(self, batch: MicroBatch, output: ModelOutput) -> PassWeights:
        """Return the weights that follow from log π_old of a first pass's forward, and keep both.

        The methods weigh on the CPU, one response at a time. So the host waits for the forward pass here.
        """
        distributions = output.statistics if self.token_weights.needs_entropies else None
        old_log_probs.store(batch.samples, batch.action_log_probs, distributions)
        self.token_weights.weigh(batch.samples)
        weights = PassWeights.of_samples(batch.samples, batch.pass_index)
        return on_device([weights], batch.action_log_probs.device)[0]

    def _step_of_upstreams_loop(self, experience: Experience, kl_ctl: float, step: int, info: dict | None) -> dict:
        """Take the step with weights of one, and the optimizer's. Without statistics, take upstream's own."""
        if self.statistics is None:
            return super().training_step(experience, kl_ctl, step, info)
        buffer, response, is_dynamic = self.replay_buffer, experience.action_mask, self.replay_buffer.dynamic_batch
        info = info or get_loss_batch_info(
            self.strategy, response, replay_buffer=buffer, step=step, dynamic_batch=is_dynamic
        )
        batch = MicroBatch(
            **vars(experience),
            weights=PassWeights.of(torch.ones_like(experience.advantages), response),
            selected=response,
            denominators=info,
            share=buffer.dynamic_sample_loss_scale[step] if is_dynamic else 1.0,
        )
        status = self.training_step(batch, kl_ctl, step)
        # DeepSpeed and EMA count all micro-batches but dynamic ones.
        steps = not is_dynamic or buffer.dynamic_optimizer_step[step]
        figures = self.optimizer_step(1) if steps else self._learning_rate()
        status["metrics"] |= figures
        status["weights"] |= dict.fromkeys(figures)
        return status

    def optimizer_step(self, micro_batches: int) -> dict[str, float]:
        """Step the optimizer and average the weights, as so many micro-batches count. Return what is logged."""
        self.strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
        self.average_weights(micro_batches)
        return self._learning_rate() | {"actor_grad_norm": self.strategy.get_grad_norm(self.actor)}

    def _learning_rate(self) -> dict[str, float]:
        return {"actor_lr": self.actor_scheduler.get_last_lr()[0]}

    def average_weights(self, micro_batches: int) -> None:
        """Let EMA count so many micro-batches. It averages once for each `gradient_accumulation_steps` of them."""
        if self.ema_model:
            for _ in range(micro_batches):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")


def computes_selected(actor: Actor, ring_attn_group=None) -> bool:
    """Return whether a forward pass computes the selected tokens only. If not, it computes what OpenRLHF's does."""
    return isinstance(actor, SelectiveActor) and not actor.is_vlm and ring_attn_group is None


def is_idle(advantages: Tensor, actor: Actor, args: SimpleNamespace) -> Tensor:
    """Return (...,) bool, whether a response with advantages (..., A) has no gradient, so that nobody computes it."""
    has_other_gradients = args.algo.kl.use_loss or args.actor.entropy_coef is not None
    if has_other_gradients or not isinstance(actor, SelectiveActor):
        return torch.zeros_like(advantages[..., 0]).bool()
    return (advantages == 0).all(dim=-1)


def pass_policy_loss(
    policy_loss: PolicyLoss, batch: MicroBatch, weights: PassWeights, log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return upstream's loss over the whole response, with the gradient of only the selected tokens that are updated.

    The other tokens are held constant. So every denominator and every sequence-level statistic (seq-mean-token-mean,
    GSPO's ratio, the importance-sampling gate) stays that of the response. At one θ the gradients of Lopti's two
    passes add up to the whole gradient.

    Args:
        policy_loss: upstream's loss.
        batch: the micro-batch, with log π_old.
        weights: of the pass. Advantages are multiplied by their factors.
        log_probs: (B, A) log π_θ of the selected tokens, with graph.

    Returns:
        The loss, and the scalars that upstream logs. `ppo_clip_ratio` and `ppo_kl` are means over the updated tokens;
        those that were not selected count as unmoved. For GSPO, whose ratio is the sequence's, they are means over
        the response. A mean over no tokens is 0. The last two are None without importance-sampling correction.
    """
    old, response, advantages = batch.action_log_probs, batch.action_mask, batch.advantages * weights.factors
    selected = batch.selected.bool()
    has_gradient = selected & weights.updated.bool()
    if policy_loss.policy_loss_type == "gspo":
        held_constant = torch.where(selected, log_probs.detach(), old)
        log_probs, scale = torch.where(has_gradient, log_probs, held_constant), 1
    else:
        # Elsewhere the ratio is 1 and the advantage 0: no value and no gradient.
        log_probs = torch.where(has_gradient, log_probs, old)
        advantages = advantages * has_gradient
        scale = response.sum() / weights.updated.sum().clamp(min=1)
    loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = policy_loss(
        log_probs,
        old,
        advantages,
        action_mask=response,
        rollout_log_probs=batch.rollout_log_probs,
        **batch.denominators,
    )
    any_token = response.any()

    def mean(value: Tensor | None, scale: Tensor | int = 1) -> Tensor | None:
        return None if value is None else torch.where(any_token, value.detach() * scale, 0.0)

    return loss, {
        "policy_loss": loss,
        "ppo_clip_ratio": mean(clip_ratio, scale),
        "ppo_kl": mean(ppo_kl, scale),
        "vllm_kl": mean(vllm_kl),
        "is_filter_ratio": mean(is_filter_ratio),
    }


def micro_batch_loss(
    batch: MicroBatch,
    weights: PassWeights,
    log_probs: Tensor,
    policy_log_probs: Tensor,
    output: ModelOutput,
    policy_loss: PolicyLoss,
    args: SimpleNamespace,
    kl_ctl: float,
    aux_loss_coef: float | None,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss of a micro-batch in one pass, and the scalars that upstream logs.

    It restates the loss of upstream's `training_step`. With weights of one it equals that bit for bit.

    Args:
        batch: the micro-batch, with log π_old.
        weights: of the pass.
        log_probs: (B, A) log π_θ of the selected tokens, with graph.
        policy_log_probs: (B, A) a view of them for the policy loss. The derivative by that view holds no KL.
        output: the model's, with entropies and the experts' balancing loss if those have a coefficient.
        policy_loss: upstream's.
        args: upstream's nested arguments.
        kl_ctl: coefficient of the KL loss.
        aux_loss_coef: of the experts' balancing loss, or None.
    """
    loss, logged = pass_policy_loss(policy_loss, batch, weights, policy_log_probs)
    updated = weights.updated
    # Upstream's penalties, of the same tokens: the KL to the reference, the experts' balance, the entropy.
    if args.algo.kl.use_loss:
        kl, difference = _kl(args, log_probs, batch)
        mean_kl = aggregate_loss(kl, updated, **batch.denominators)
        loss = loss + mean_kl * kl_ctl
        logged |= {"kl": mean_kl, "logprobs_diff": (difference * updated).sum() / updated.sum().clamp(min=1)}
    if aux_loss_coef is not None:
        loss = loss + output.aux_loss * aux_loss_coef * batch.share
    if args.actor.entropy_coef is not None:
        entropy = aggregate_loss(output.entropy[:, -updated.shape[1] :], updated, **batch.denominators)
        logged["entropy_loss"] = entropy
        if args.actor.entropy_coef != 0:
            loss = loss - entropy * args.actor.entropy_coef
    return loss, logged


def _kl(args: SimpleNamespace, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return upstream's estimate of the KL to the reference, and log π_θ − log π_ref, (B, A) each."""
    if args.algo.kl.init_coef <= 0:  # there is no reference
        return torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    kl = compute_approx_kl(
        log_probs,
        batch.base_action_log_probs,
        log_probs_old=batch.action_log_probs,
        kl_estimator=args.algo.kl.estimator,
        unbiased_gradient=args.algo.kl.unbiased_gradient,
    )
    return kl, log_probs.detach().float() - batch.base_action_log_probs.float()


def token_updates(
    loss: Tensor,
    batch: MicroBatch,
    weights: PassWeights,
    log_probs: Tensor,
    policy_log_probs: Tensor,
    distributions: tuple[Tensor, Tensor],
) -> TokenUpdates:
    """Return what the loss of a micro-batch does to the tokens that the pass updates.

    It takes derivatives by the log-probs, through the loss function only. The graph of the model stays as it is, so
    the gradients of the backward pass that follows are the same bit for bit.

    Args:
        loss: scalar, of `micro_batch_loss`, whose other arguments these are.
        distributions: (B, A) entropies and (B, A) Σ_{j≠o} P_j².
    """
    whole, policy = torch.autograd.grad(loss, [log_probs, policy_log_probs], retain_graph=True)
    # The loss is a mean over the optimizer step's tokens, times the ranks. Weights are in units of a token's own loss.
    num_tokens = batch.denominators["batch_num_tokens"] / batch.denominators["dp_size"]
    factors, is_computed = weights.factors.clamp(min=torch.finfo(torch.float32).tiny), batch.selected.bool()
    entropies, squared_rest = distributions
    tokens = TokenUpdates(
        old_log_probs=batch.action_log_probs,
        log_probs=log_probs.detach(),
        advantages=batch.advantages,
        weights=whole * num_tokens,
        weights_before_ar=(whole - policy + policy / factors) * num_tokens,
        is_clipped=is_computed & (batch.advantages != 0) & (policy == 0),
        is_computed=is_computed,
        entropies=entropies,
        squared_rest=squared_rest,
    )
    return TokenUpdates(*(values.flatten()[weights.places] for values in tokens))
