"""Stock OpenRLHF's update and ours, in turn on one DeepSpeed engine."""

import argparse
import copy
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from hardware import free_port, synchronize
from rollouts import SAMPLES_PER_PROMPT, SHAPES, operations, rollout

from arlopti_openrlhf import cpu
from arlopti_openrlhf.forward.selective_actor import replaced_attribute
from arlopti_openrlhf.update import micro_batch
from arlopti_openrlhf.update.old_log_probs import unknown

LOW_SHARE = 0.15
VARIANTS = ("stock GRPO", "GRPO", "AR", "Lopti", "AR + Lopti")


def training_flags(args: argparse.Namespace) -> SimpleNamespace:
    """OpenRLHF's nested arguments, from the real parser: GRPO as in the paper."""
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    size = args.prompts * SAMPLES_PER_PROMPT
    flags = hierarchize(
        parse(
            f"--actor.model_name_or_path {args.shape} --actor.num_gpus_per_node 1 --actor.adam.lr 0 "
            f"--rollout.batch_size {args.prompts * args.mini_batches} "
            f"--rollout.n_samples_per_prompt {SAMPLES_PER_PROMPT} --train.batch_size {size} --ds.zero_stage 2 "
            f"--rollout.micro_batch_size {args.micro_batch_size} --train.micro_batch_size {args.micro_batch_size} "
            f"--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 "
            f"--algo.kl.init_coef 0.001 --actor.eps_clip_low_high 0.2 0.24 --actor.dual_clip 10".split()
            + (["--ds.packing_samples"] if args.packing else [])
            + (["--ds.attn_implementation", "sdpa"] if cpu.uses_cpu() and not args.packing else [])
        )
    )
    flags.actor.eps_clip_low_high = tuple(flags.actor.eps_clip_low_high)
    flags.local_rank = 0
    return flags


def default_attention() -> str:
    return "sdpa" if cpu.uses_cpu() or importlib.util.find_spec("flash_attn") is None else "flash_attention_2"


class Bench:
    """One DeepSpeed engine, and per variant OpenRLHF's trainer on it.

    A variant with "stock" in its name computes with OpenRLHF's actor. "stock GRPO" has OpenRLHF's trainer too.

    Args:
        args: the command's.
        model: the policy, in bf16 or float32, on the device. The engine takes it over.
        also: variants beside VARIANTS that get a trainer.
    """

    def __init__(
        self, args: argparse.Namespace, model: torch.nn.Module, also: Sequence[str] = ("observed stock GRPO",)
    ) -> None:
        from openrlhf.models import Actor
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import get_strategy

        from arlopti_openrlhf.forward.selective_actor import SelectiveActor
        from arlopti_openrlhf.update import trainer

        self.args = args
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
        selective.packing_samples, selective.is_vlm = args.packing, False
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
        self.stock.packing_samples, self.stock.is_vlm = args.packing, False
        self.rollout = rollout(args, args.scale)
        self.lengths = [len(s.sequences[0]) for s in self.rollout]
        self.tokens = sum(self.lengths)
        eta = self.prepare_log_probs(selective)
        self.actors, self.trainers = {}, {}
        for variant in (*VARIANTS, *also):
            own = copy.copy(strategy)
            own.args = copy.deepcopy(self.flags)
            own.args.algo.ar.alpha = 0.3 if "AR" in variant else 0.0
            own.args.algo.lopti.eta = eta if "Lopti" in variant else None
            actor = self.actors[variant] = self.stock if "stock" in variant else selective
            trainer_class = ppo_actor.ActorPPOTrainer if variant == "stock GRPO" else trainer.TokenUpdateTrainer
            self.trainers[variant] = trainer_class(
                own,
                actor,
                ema_model=None,
                actor_optim=optimizer,
                actor_scheduler=scheduler,
                micro_train_batch_size=args.micro_batch_size,
            )

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
        trainer, actor = self.trainers[variant], self.actors[variant]
        samples = copy.deepcopy(samples or self.rollout)
        is_deferred = variant != "stock GRPO" and trainer.defers_old_log_probs
        synchronize()
        start = time.perf_counter()
        log_probs = [unknown(s.action_mask) for s in samples] if is_deferred else self.old_log_probs(actor, samples)
        for sample, sample.action_log_probs in zip(samples, log_probs, strict=True):
            trainer.replay_buffer.append(sample)
        trainer.ppo_train(self.flags.algo.kl.init_coef)
        synchronize()
        seconds = time.perf_counter() - start
        trainer.replay_buffer.clear()
        return seconds

    def fraction(self, size: float) -> list:
        """A rollout batch whose lengths are those of the timed one, times `size`."""
        samples = rollout(self.args, self.args.scale * size)
        for sample in samples:
            sample.base_action_log_probs = torch.full(
                sample.action_mask.shape, -math.log(SHAPES[self.args.shape].vocab_size)
            )
        return samples

    def peak_memory(self) -> dict[str, float]:
        """GiB that a step of each variant reaches: resident on the CPU, allocated on the GPU.

        The `floor` is a step on next to no tokens: weights, gradients, AdamW's state, and what DeepSpeed's own step
        takes. As all share the engine, it is the same for all.
        """
        self.step("GRPO", self.fraction(0.01))  # the first step allocates
        return {"floor": self.peak("GRPO", self.fraction(0.01))} | {name: self.peak(name) for name in VARIANTS}

    def peak(self, variant: str, samples=None) -> float:
        """GiB that a step of this variant reaches."""
        if cpu.uses_cpu():
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        else:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.step(variant, samples)
        if not cpu.uses_cpu():
            return torch.cuda.max_memory_allocated() / 2**30
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20

    def time_in_turn(self, repeats: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for i in range(repeats):
            for variant in VARIANTS:
                seconds[variant].append(self.step(variant))
            print(f"  {i + 1}: " + ", ".join(f"{v} {s[-1]:.2f} s" for v, s in seconds.items()), flush=True)
        return seconds

    def growth(self, sizes: list[float]) -> list[dict]:
        points = []
        for size in sizes:
            samples = self.fraction(size)
            seconds = self.step("AR + Lopti", samples)
            points.append(dict(tokens=sum(s.sequences.shape[1] for s in samples), seconds=seconds))
        return points

    def seconds_of_reweighting(self) -> float:
        """Of all AR does to one rollout batch."""
        from arlopti_openrlhf.token_update import reweight_advantages

        rows = [(s.advantages, s.base_action_log_probs) for s in self.rollout]
        start = time.perf_counter()
        for advantages, log_probs in rows:
            reweight_advantages(advantages, log_probs, 0.3)
        return time.perf_counter() - start

    def describe(self) -> str:
        prompt = sum(s.sequences.shape[1] - s.action_mask.sum().item() for s in self.rollout)
        samples, prompts = len(self.rollout), len(self.rollout) // SAMPLES_PER_PROMPT
        return (
            f"{SHAPES[self.args.shape].name} shape, {samples} responses to {prompts} prompts, "
            f"{self.tokens} tokens ({prompt} of prompts), {self.args.mini_batches} optimizer steps, "
            f"lengths of K&K x {self.args.scale:.4g}{', packed' if self.args.packing else ''}"
        )


def summary(
    bench: Bench, seconds: dict[str, list[float]], memory: dict[str, float], rate: float
) -> dict[str, dict[str, float | list[float] | None]]:
    """The figures of each variant in `seconds`. Ratios are None where stock was not measured.

    Args:
        seconds: by variant, one for each round.
        memory: GiB by variant.
        rate: FLOP/s of the machine's matrix products.
    """
    stock, results = seconds.get("stock GRPO"), {}
    for variant, times in seconds.items():
        middle = statistics.median(times)
        passes = 2 if "Lopti" in variant else 1
        results[variant] = dict(
            seconds=middle,
            spread=[min(times), max(times)],
            time_ratio=stock and statistics.median(ours / theirs for ours, theirs in zip(times, stock, strict=True)),
            tokens_per_s=bench.tokens / middle,
            mfu=operations(bench.args.shape, bench.lengths, passes) / middle / rate,
            memory_gib=memory[variant],
            memory_ratio=stock and memory[variant] / memory["stock GRPO"],
        )
    return results


def seconds_of_statistics(bench: Bench) -> dict[str, float]:
    """What `--logger.probability_stats` adds to an update, by variant.

    What follows the forward pass is timed in an update. In the selective one the head also sums up its blocks of
    logits with entropies and squares. What that adds is timed on one block, with and without by turns.
    """
    # The first pass of Lopti is on-policy, and computes the high group too.
    rows = int(sum(s.action_mask.sum().item() for s in bench.rollout) * (2 - LOW_SHARE))
    per_row = seconds_of_statistics_per_row(SHAPES[bench.args.shape].vocab_size)
    return {
        "stock GRPO": seconds_of_observing(bench, "observed stock GRPO"),
        "AR + Lopti": seconds_of_observing(bench, "AR + Lopti") + rows * per_row,
    }


def seconds_of_observing(bench: Bench, variant: str) -> float:
    """What follows the forward pass in one update: derivatives and sums, and on stock's logits their statistics."""
    trainer, seconds = bench.trainers[variant], [0.0]

    def timed(function):
        def call(*args, **kwargs):
            synchronize()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            seconds[0] += time.perf_counter() - start
            return result

        return call

    with (
        replaced_attribute(trainer, "_observe", timed(trainer._observe)),
        replaced_attribute(micro_batch, "statistics_of_logits", timed(micro_batch.statistics_of_logits)),
    ):
        bench.step(variant)
    return seconds[0]


def seconds_of_statistics_per_row(vocabulary: int) -> float:
    """What entropies and squares add to the sums over one row of the vocabulary's logits."""
    from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS, _BlockSums

    device, rows = torch.cuda.current_device(), 512
    logits = torch.randn(rows, BLOCK_ELEMENTS // rows, device=device)
    targets = torch.zeros(rows, 1, dtype=torch.long, device=device)
    inside = torch.ones(rows, dtype=torch.bool, device=device)
    differences = []
    for _ in range(9):
        durations = []
        for with_statistics in (False, True):
            block = logits.clone()
            synchronize()
            start = time.perf_counter()
            _BlockSums.of(block, inside, targets, with_statistics)
            synchronize()
            durations.append(time.perf_counter() - start)
        differences.append(durations[1] - durations[0])
    return statistics.median(differences) * vocabulary / logits.numel()
