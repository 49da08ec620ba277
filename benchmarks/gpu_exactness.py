"""The selective update beside OpenRLHF's own: log-probs, loss and gradients of one update on the same batch.

The reference is OpenRLHF's update in float32. What bf16 itself costs is how far OpenRLHF's update in bf16 is from it.
The selective update is exact if it is no further away, up to a factor. In float32 the two agree far more closely.
With Liger's kernels both have them, and the reference has none.

Nothing jumps where rounding moves a log-prob: no ratio is clipped, and η lies in the widest gap between tokens, which
is wider than the rounding of float32. That of bf16 may exceed the gap, so in bf16 Lopti takes the reference's π_old.
Otherwise π_old is that of the policy that is updated, and the selective update takes it from its first pass.
"""

import argparse
import copy
import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from operations import LOW_SHARE
from rollouts import SHAPES, make_model
from torch import Tensor
from update_bench import REFERENCE, STOCK, Bench

from arlopti_openrlhf import cpu
from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.update import optimizer_steps
from arlopti_openrlhf.update.old_log_probs import unknown


@dataclass(frozen=True)
class Attention:
    """An attention implementation, by transformers' name, and what it takes to run it."""

    name: str
    package: str = "torch"
    on_cpu: bool = True
    computes_float32: bool = True

    def obstacle(self) -> str | None:
        """Return why it does not run here, or None where it does."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None if self.on_cpu or not cpu.uses_cpu() else "needs a GPU"


ATTENTION = (
    Attention("sdpa"),
    Attention("flex_attention", on_cpu=False),
    Attention("flash_attention_2", package="flash_attn", on_cpu=False, computes_float32=False),
)
# How far the selective update may be from the reference, as a multiple of how far OpenRLHF's bf16 update is.
FACTOR = {"bfloat16": 1.5, "float32": 0.01}
PLAIN = {"GRPO": STOCK, "AR + Lopti": REFERENCE}  # ours, and the same on OpenRLHF's actor, in its update loop
STAGES = ("GRPO", "low", "high")  # the gradients: one of GRPO, and one of each stage of AR + Lopti


@dataclass
class Batch:
    """A rollout batch with the float32 reference's log-probs as the old ones, and the η that divides it."""

    samples: list
    eta: float


@dataclass
class Outcome:
    """What one way of computing gives."""

    log_probs: Tensor  # (N,) of all response tokens
    losses: list[float]  # by STAGES
    gradients: list  # by STAGES: the reference's tensors, or the relative distance from them


class ExactBench(Bench):
    """A bench that takes one update of a given batch, or of a new one, and keeps what it computes.

    `batch` is the batch that it has taken or made.
    """

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, batch: Batch | None) -> None:
        self.batch = batch
        super().__init__(args, model, also=(REFERENCE,))
        self.rounds_across_eta = model.dtype != torch.float32
        for trainer in self.trainers.values():
            trainer.actor_loss_fn.clip_eps_low, trainer.actor_loss_fn.clip_eps_high = 0.99, 99.0

    def prepare_log_probs(self, actor) -> float:
        if self.batch is None:
            super().prepare_log_probs(self.stock)
            rows = self.old_log_probs(self.stock, self.rollout)
            for sample, row in zip(self.rollout, rows, strict=True):
                sample.action_log_probs = row
            log_probs = torch.cat([s.action_log_probs[s.action_mask.bool()] for s in self.rollout])
            self.batch = Batch(self.rollout, threshold(log_probs))
        self.rollout = self.batch.samples
        return self.batch.eta

    def outcome(self, variants: list[str], compared_to: Outcome | None = None) -> Outcome:
        """Compute log-probs and take one update of each variant; both have the same actor."""
        rows = self.old_log_probs(self.actors[variants[0]], self.rollout)
        log_probs = torch.cat([row[s.action_mask.bool()] for row, s in zip(rows, self.rollout, strict=True)])
        result = Outcome(log_probs.float(), [], [])
        for variant in variants:
            self._update(variant, rows, result, compared_to)
        return result

    def _update(self, variant: str, own: list[Tensor], result: Outcome, compared_to: Outcome | None) -> None:
        from deepspeed.utils import safe_get_full_grad

        trainer, parameters = self.trainers[variant], list(self.actors[variant].model.module.parameters())
        backward = trainer.strategy.backward

        def watched_backward(loss, *args, **kwargs):
            result.losses.append(loss.item())
            backward(loss, *args, **kwargs)

        def watched_step(optimizer, actor, scheduler, **kwargs):
            gradients = (safe_get_full_grad(parameter) for parameter in parameters)
            if compared_to is None:
                result.gradients.append([gradient.clone() for gradient in gradients])
            else:
                reference = compared_to.gradients[len(result.gradients)]
                result.gradients.append(relative_distance(gradients, reference))
            optimizer_steps.skip(actor.model, scheduler)  # AdamW's state would take twice the weights' memory

        takes_reference = self.rounds_across_eta and "Lopti" in variant
        for sample, row in zip(copy.deepcopy(self.rollout), own, strict=True):
            if not takes_reference:
                sample.action_log_probs = unknown(sample.action_mask) if variant in PLAIN else row
            trainer.replay_buffer.append(sample)
        with (
            replaced_attribute(trainer, "first_pass_gives_old_log_probs", False) if takes_reference else nullcontext(),
            replaced_attribute(trainer.strategy, "backward", watched_backward),
            replaced_attribute(trainer.strategy, "optimizer_step", watched_step),
        ):
            trainer.ppo_train(self.flags.algo.kl.init_coef)
        trainer.replay_buffer.clear()


def threshold(log_probs: Tensor) -> float:
    """An η near LOW_SHARE, as far as can be from any token's probability: rounding then moves no token to a group."""
    ordered = log_probs.double().sort().values
    first, last = (int(share * len(ordered)) for share in (0.8 * LOW_SHARE, 1.2 * LOW_SHARE))
    window = ordered[first : max(last, first + 1) + 1]
    widest = int(window.diff().argmax())
    return float(((window[widest] + window[widest + 1]) / 2).exp())


def relative_distance(gradients, reference: list[Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters."""
    difference = sum(
        float((ours.float() - theirs.float()).norm().double() ** 2)
        for ours, theirs in zip(gradients, reference, strict=True)
    )
    return (difference / sum(float(theirs.float().norm().double() ** 2) for theirs in reference)) ** 0.5


@contextmanager
def exact_bench(
    args: argparse.Namespace, attention: str, dtype: torch.dtype, batch: Batch | None = None, liger: bool = False
) -> Iterator[ExactBench]:
    """Yield a bench. Its engine goes when the context ends, to make room for the next one."""
    model = make_model(args.shape, attention, dtype, sharpness=4.0, liger=liger)
    # The logits of stock in float32 take enough.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    bench = ExactBench(args, model, batch)
    try:
        yield bench
    finally:
        bench.stock.model.destroy()  # its hooks on the weights would keep all of it
        for actor in bench.actors.values():
            actor.model = None
        bench.trainers.clear()
        bench.strategy = bench.optimizer = bench.scheduler = None
        gc.collect()
        torch.cuda.empty_cache()


def left_out() -> list[str]:
    """Return the attention implementations that do not run here, with the reason."""
    return [f"{attention.name} ({obstacle})" for attention in ATTENTION if (obstacle := attention.obstacle())]


def compare(args: argparse.Namespace) -> list[dict]:
    """Return a row for each type with SDPA, or with the other attention implementations that run here.

    Args:
        args: the part's. `others` says with which, and `liger` whether with Liger's kernels.
    """
    ours, plain = list(PLAIN), list(PLAIN.values())
    with exact_bench(args, "sdpa", torch.float32) as bench:
        batch, reference = bench.batch, bench.outcome(plain)
        found = {}
        if not args.others and not args.liger:
            found["sdpa", "float32"] = errors(bench.outcome(ours, reference), reference), sharing(bench)
    plain_bf16 = {}
    for attention in ATTENTION:
        if attention.obstacle() or (attention.name != "sdpa") != args.others:
            continue
        if attention.computes_float32 and (attention.name, "float32") not in found:
            with exact_bench(args, attention.name, torch.float32, batch, args.liger) as bench:
                outcome = bench.outcome(ours, reference)
                found[attention.name, "float32"] = errors(outcome, reference), sharing(bench)
        with exact_bench(args, attention.name, torch.bfloat16, batch, args.liger) as bench:
            plain_bf16[attention.name] = errors(bench.outcome(plain, reference), reference)
            found[attention.name, "bfloat16"] = errors(bench.outcome(ours, reference), reference), sharing(bench)
    name = SHAPES[args.shape].name + (" with Liger" if args.liger else "")
    return [
        judged(
            dict(name=name, tokens=bench.tokens, attention=attention, dtype=dtype, prompts=prompts),
            selective,
            plain_bf16[attention],
        )
        for (attention, dtype), (selective, prompts) in found.items()
    ]


def sharing(bench: ExactBench) -> str:
    """Whether the selective actor computes prompts once."""
    reason = bench.actors["GRPO"].shortcuts.reason_not_to_share
    return "shared" if reason is None else f"not shared: {reason}"


def errors(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """How far log-probs in nats, losses and gradients are from the reference's."""
    difference = (outcome.log_probs - reference.log_probs).abs()
    pairs = zip(outcome.losses, reference.losses, strict=True)
    return {
        "log_prob_max": difference.max().item(),
        "log_prob_mean": difference.mean().item(),
        "loss": max(abs(ours - theirs) for ours, theirs in pairs),
    } | {f"gradient_{stage}": distance for stage, distance in zip(STAGES, outcome.gradients, strict=True)}


def judged(row: dict, found: dict[str, float], plain: dict[str, float]) -> dict:
    """Return the row with its errors beside those of OpenRLHF's bf16, and what exceeds them."""
    factor = FACTOR[row["dtype"]]
    # Rounding may cancel in a loss, which is a mean. It cannot exceed what it does to a token's log-prob on average.
    bounds = plain | {"loss": plain["log_prob_mean"]}
    failures = [
        f"{name} {value:.2g}, at most {factor:g} x {bounds[name]:.2g}"
        for name, value in found.items()
        if not value <= factor * bounds[name]
    ]
    if row["prompts"] != "shared":
        failures.append(f"prompts {row['prompts']}")
    return row | {"factor": factor, "selective": found, "plain_bf16": plain, "failures": failures}
