"""Stock OpenRLHF's update and ours, in turn on one DeepSpeed engine."""

import argparse
import copy
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import baselines
import torch
from hardware import free_port, peak_gib, reset_peak, synchronize
from operations import LOW_SHARE, PACKED, STOCK
from rollouts import SAMPLES_PER_PROMPT, SHAPES, rollout

from arlopti_openrlhf import cpu
from arlopti_openrlhf.update.old_log_probs import unknown

VARIANTS = (STOCK, PACKED, "GRPO", "AR", "Lopti", "AR + Lopti", "80/20")
WITHOUT_STATISTICS = "AR + Lopti, no statistics"  # what they cost is the difference; no default
REFERENCE = "stock AR + Lopti"  # in OpenRLHF's own update loop, on its actor; no default


def training_flags(args: argparse.Namespace, more: Sequence[str] = ()) -> SimpleNamespace:
    """OpenRLHF's nested arguments, from the real parser: GRPO as in the paper, with more flags."""
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    size = args.prompts * SAMPLES_PER_PROMPT
    flags = hierarchize(
        parse(
            f"--actor.model_name_or_path {args.shape} --actor.num_gpus_per_node 1 --actor.adam.lr 0 "
            f"--actor.update selective "
            f"--rollout.batch_size {args.prompts * args.mini_batches} "
            f"--rollout.n_samples_per_prompt {SAMPLES_PER_PROMPT} --train.batch_size {size} --ds.zero_stage 2 "
            f"--rollout.micro_batch_size {args.micro_batch_size} --train.micro_batch_size {args.micro_batch_size} "
            f"--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 "
            f"--algo.kl.init_coef 0.001 --actor.eps_clip_low_high 0.2 0.24 --actor.dual_clip 10".split()
            + [*more]
            + (["--actor.gradient_checkpointing_enable"] if getattr(args, "gradient_checkpointing", False) else [])
            + (["--ds.attn_implementation", "sdpa"] if cpu.uses_cpu() else [])
        )
    )
    flags.actor.eps_clip_low_high = tuple(flags.actor.eps_clip_low_high)
    flags.local_rank = 0
    return flags


def default_attention() -> str:
    return "sdpa" if cpu.uses_cpu() or importlib.util.find_spec("flash_attn") is None else "flash_attention_2"


class Bench:
    """One DeepSpeed engine, and per variant OpenRLHF's trainer on it.

    STOCK, PACKED and REFERENCE have OpenRLHF's actor and update loop, the others the selective update's.

    Args:
        args: the command's.
        model: the policy, in bf16 or float32, on the device. The engine takes it over.
        also: variants beside VARIANTS that get a trainer.

    Attributes:
        optimizer_seconds: of the last step of each variant, what the optimizer's steps took.
        gradient_norms: after the last step of each variant; of its last stage, where it has two.
    """

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, also: Sequence[str] = ()) -> None:
        from openrlhf.models import Actor
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import get_strategy

        from arlopti_openrlhf.forward.selective_actor import SelectiveActor
        from arlopti_openrlhf.reference import ReferenceTrainer
        from arlopti_openrlhf.update import trainer

        self.args = args
        self.clock = time.process_time if getattr(args, "processor_time", False) else time.perf_counter
        bar = ppo_actor.tqdm
        for module in (ppo_actor, trainer):  # no progress bars between the figures
            module.tqdm = lambda *args, **kwargs: bar(*args, **kwargs | {"disable": True})
        os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        os.environ["MASTER_PORT"] = str(free_port())
        self.flags = training_flags(args)
        if model.dtype == torch.float32:
            self.flags.ds.param_dtype = "fp32"  # DeepSpeed then rounds nothing
        strategy = get_strategy(self.flags)
        strategy.setup_distributed()
        selective = SelectiveActor(model)
        selective.packing_samples, selective.is_vlm = self.flags.ds.packing_samples, False
        configuration = dict(
            optim="adam",
            muon=vars(self.flags.actor.muon),
            adam=vars(self.flags.actor.adam),
            lr_scheduler="constant",
            lr_warmup_ratio=0,
            min_lr_ratio=0.1,
            max_norm=1.0,
            scheduler_steps=10_000,
        )
        selective, optimizer, scheduler = strategy.prepare((selective, configuration))
        self.stock = Actor(selective.model)
        self.stock.packing_samples, self.stock.is_vlm = self.flags.ds.packing_samples, False
        self.strategy, self.optimizer, self.scheduler = strategy, optimizer, scheduler
        self.optimizer_seconds: dict[str, float] = {}
        self.gradient_norms: dict[str, float] = {}
        self.around: dict[str, Callable[[], AbstractContextManager]] = {}
        self.actors, self.trainers = {}, {}
        eta = self.take_lengths(args.scale, selective)
        for variant in (*VARIANTS, *also):
            actor = self.stock if variant in (STOCK, REFERENCE) else selective
            if variant == PACKED:
                actor = baselines.packed_actor(selective.model)
                self.around[variant] = baselines.one_pass_log_probs
            trainer_class = ppo_actor.ActorPPOTrainer if variant in (STOCK, PACKED) else trainer.TokenUpdateTrainer
            trainer_class = ReferenceTrainer if variant == REFERENCE else trainer_class
            self.add_trainer(variant, trainer_class, actor, self.method_flags(variant, eta))

    def take_lengths(self, scale: float, actor=None) -> float:
        """Make the rollout batch, in K&K's lengths times `scale`, and return the η of `prepare_log_probs`."""
        self.args.scale = scale
        self.rollout = rollout(self.args, scale)
        self.tokens = sum(len(s.sequences[0]) for s in self.rollout)
        return self.prepare_log_probs(actor or self.actors["GRPO"])

    def method_flags(self, variant: str, eta: float | None = None) -> SimpleNamespace:
        flags = copy.deepcopy(self.flags)
        flags.algo.ar.alpha = 0.3 if "AR" in variant else 0.0
        flags.algo.lopti.eta = eta if "Lopti" in variant else None
        flags.algo.token_method = ["eighty_twenty"] if variant == "80/20" else []
        if variant == WITHOUT_STATISTICS:
            flags.logger.probability_stats = "off"
        return flags

    def add_trainer(self, variant: str, trainer_class: type, actor, flags: SimpleNamespace) -> None:
        """Give a variant its trainer. All have the same engine and optimizer."""
        own = copy.copy(self.strategy)
        own.args, own.use_dynamic_batch = flags, flags.train.dynamic_batch_enable
        own.optimizer_step = self.timed_optimizer_step(variant, own.optimizer_step)
        self.actors[variant] = actor
        self.trainers[variant] = trainer_class(
            own,
            actor,
            ema_model=None,
            actor_optim=self.optimizer,
            actor_scheduler=self.scheduler,
            micro_train_batch_size=self.args.micro_batch_size,
        )

    def timed_optimizer_step(self, variant: str, function: Callable) -> Callable:
        """Return `optimizer_step` of a strategy, with its seconds added up under the variant's name."""

        def optimizer_step(*args, **kwargs):
            synchronize()
            start = self.clock()
            function(*args, **kwargs)
            synchronize()
            self.optimizer_seconds[variant] += self.clock() - start

        return optimizer_step

    def prepare_log_probs(self, actor) -> float:
        """Gives the samples reference log-probs near the policy's; the η below which LOW_SHARE of the tokens lies."""
        from arlopti_openrlhf.token_update import probability_quantile

        generator, log_probs = torch.Generator().manual_seed(1), []
        for sample, values in zip(self.rollout, self.old_log_probs(actor, self.rollout), strict=True):
            sample.base_action_log_probs = values + 0.1 * torch.randn(values.shape, generator=generator)
            log_probs.append(values[sample.action_mask.bool()])
        log_probs = torch.cat(log_probs)[None]
        return probability_quantile(log_probs, torch.ones_like(log_probs), LOW_SHARE)

    def old_log_probs(self, actor, samples) -> list[torch.Tensor]:
        """As `PolicyModelActor.forward`, by micro rollout batches; (1, A) per sample."""
        from openrlhf.trainer.ppo_utils.experience import Experience

        size, result, device = self.flags.rollout.micro_batch_size, [], torch.cuda.current_device()
        actor.eval()
        for i in range(0, len(samples), size):
            batch = Experience.concat_experiences(copy.deepcopy(samples[i : i + size]), 0)
            with torch.no_grad():
                log_probs = actor(
                    batch.sequences.to(device), batch.action_mask.to(device), batch.attention_mask.to(device)
                )
            lengths = [s.action_mask.shape[1] for s in samples[i : i + size]]
            result += [row[None, :length] for row, length in zip(log_probs.cpu(), lengths, strict=True)]
        actor.train()
        return result

    def step(self, variant: str, samples=None) -> float:
        """Seconds for old log-probs and update of one rollout batch."""
        samples = copy.deepcopy(samples or self.rollout)
        self.optimizer_seconds[variant] = 0.0
        with self.around.get(variant, nullcontext)():
            synchronize()
            start = self.clock()
            self._update(variant, samples)
            synchronize()
            seconds = self.clock() - start
        self.gradient_norms[variant] = float(self.stock.model.get_global_grad_norm())
        return seconds

    def _update(self, variant: str, samples: list) -> None:
        trainer, actor = self.trainers[variant], self.actors[variant]
        is_deferred = getattr(trainer, "defers_old_log_probs", False)  # of ours; OpenRLHF's trainer has none
        log_probs = [unknown(s.action_mask) for s in samples] if is_deferred else self.old_log_probs(actor, samples)
        for sample, values in zip(samples, log_probs, strict=True):
            sample.action_log_probs = values
            trainer.replay_buffer.append(sample)
        trainer.ppo_train(self.flags.algo.kl.init_coef)
        trainer.replay_buffer.clear()
        if planner := getattr(trainer, "planner", None):
            planner.set(planner.levels[-1])  # the model is the other variants' too

    def fraction(self, size: float) -> list:
        """A rollout batch whose lengths are those of the timed one, times `size`."""
        samples = rollout(self.args, self.args.scale * size)
        for sample in samples:
            sample.base_action_log_probs = torch.full(
                sample.action_mask.shape, -math.log(SHAPES[self.args.shape].vocab_size)
            )
        return samples

    def peak(self, variant: str, samples=None) -> float:
        """GiB that a step of this variant reaches."""
        reset_peak()
        self.step(variant, samples)
        return peak_gib()

    def describe(self) -> str:
        prompt = sum(s.sequences.shape[1] - s.action_mask.sum().item() for s in self.rollout)
        samples, prompts = len(self.rollout), len(self.rollout) // SAMPLES_PER_PROMPT
        checkpointing, length = self.stock.model.module.is_gradient_checkpointing, self.args.response_length
        lengths = f"responses of {length}" if length else f"lengths of K&K x {self.args.scale:.4g}"
        return (
            f"{SHAPES[self.args.shape].name} shape, {samples} responses to {prompts} prompts, "
            f"{self.tokens} tokens ({prompt} of prompts), micro-batches of {self.args.micro_batch_size}, "
            f"{self.args.mini_batches} optimizer step{'s' * (self.args.mini_batches > 1)}, {lengths}"
            f"{', gradient checkpointing' if checkpointing else ''}"
        )
