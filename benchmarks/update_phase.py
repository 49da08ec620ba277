"""Old log-probs and update of one rollout batch: stock OpenRLHF 0.11.2 beside ours, in turn, on the same engine.

python benchmarks/update_phase.py [--shape 0.5b] [--scale 0.0714] [--json results.json] [--chart chart.png]

What is timed is what an RL step does between the rollout and the weight sync, through OpenRLHF's own trainer class and
a DeepSpeed engine of one rank: the forward passes for the old log-probs, then `ppo_train`. Random weights in a
published model's shape, learning rate 0, so that every run computes the same. Peak memory is measured in a
round of its own, in which freed memory is given back at once.
"""

import argparse
import copy
import ctypes
import json
import logging
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf import cpu

logging.disable(logging.WARNING)
cpu.enable()

import torch  # noqa: E402

SHAPES = {  # published configurations of Qwen2.5, with tied embeddings; and one to try the benchmark itself
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    ),
    "3b": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2
    ),
}
VOCABULARY, SAMPLES_PER_PROMPT, LOW_SHARE = 151_936, 8, 0.15
VARIANTS = ("stock GRPO", "GRPO", "AR", "Lopti", "AR + Lopti")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_cpu = cpu.uses_cpu()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--scale", type=float, default=1 / 14 if on_cpu else 1.0, help="factor on K&K's lengths")
    parser.add_argument("--prompts", type=int, default=1 if on_cpu else 8, help="per mini-batch, 8 responses each")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per rollout batch")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="responses")
    parser.add_argument("--packing", action="store_true", help="--ds.packing_samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.25, 0.5, 0.75], help="growth: of --scale")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--chart", metavar="PATH")
    args = parser.parse_args()
    keep_freed_memory(False)
    with tempfile.TemporaryDirectory() as args.model:
        make_model(args.shape, args.model)
        bench = Bench(args)
    print(bench.describe(), flush=True)
    memory = bench.peak_memory()
    keep_freed_memory(True)
    growth = bench.growth(args.sizes)
    seconds = bench.time_in_turn(args.repeats)
    growth.append(dict(tokens=bench.tokens, seconds=statistics.median(seconds["AR + Lopti"])))
    rate = matrix_product_rate()
    results = {
        variant: dict(
            seconds=statistics.median(seconds[variant]),
            spread=[min(seconds[variant]), max(seconds[variant])],
            time_ratio=statistics.median(
                ours / stock for ours, stock in zip(seconds[variant], seconds["stock GRPO"], strict=True)
            ),
            tokens_per_s=bench.tokens / statistics.median(seconds[variant]),
            mfu=bench.operations("Lopti" in variant) / statistics.median(seconds[variant]) / rate,
            memory_gib=memory[variant],
            memory_ratio=memory[variant] / memory["stock GRPO"],
        )
        for variant in VARIANTS
    }
    print(table(results))
    print(f"matrix products: {rate / 1e9:,.0f} GFLOP/s")
    print(f"AR itself takes {bench.seconds_of_reweighting() * 1e3:.2f} ms of its update")
    statistics_seconds = bench.seconds_of_statistics()
    statistics_share = {v: s / results[v]["seconds"] for v, s in statistics_seconds.items()}
    for variant, share in statistics_share.items():
        print(f"statistics by probability take {statistics_seconds[variant]:.3f} s of {variant}'s update, {share:.2%}")
    print(f"an update of next to no tokens takes {memory['floor']:.1f} GiB")
    print("AR + Lopti by tokens: " + ", ".join(f"{p['tokens']} in {p['seconds']:.2f} s" for p in growth))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "model"}
        record = dict(
            machine=machine(),
            settings=settings,
            tokens=bench.tokens,
            matrix_flops_per_s=rate,
            growth=growth,
            floor_gib=memory["floor"],
            statistics_seconds=statistics_seconds,
            statistics_share=statistics_share,
        )
        Path(args.json).write_text(json.dumps(record | {"variants": results}, indent=1) + "\n", encoding="utf-8")
    if args.chart:
        draw(results, args.chart, bench.describe())


class Bench:
    """One DeepSpeed engine, and per variant OpenRLHF's trainer on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from openrlhf.models import Actor
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import get_strategy

        from arlopti_openrlhf.forward.selective_actor import SelectiveActor
        from arlopti_openrlhf.update.trainer import TokenUpdateTrainer

        self.args = args
        bar = ppo_actor.tqdm
        ppo_actor.tqdm = lambda *args, **kwargs: bar(*args, **kwargs | {"disable": True})
        os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        os.environ["MASTER_PORT"] = str(free_port())
        self.flags = training_flags(args)
        strategy = get_strategy(self.flags)
        strategy.setup_distributed()
        selective = SelectiveActor(
            args.model,
            attn_implementation=self.flags.ds.attn_implementation,
            ds_config=strategy.get_ds_train_config(),
            packing_samples=args.packing,
        )
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
        stock = Actor(selective.model)
        stock.packing_samples, stock.is_vlm = args.packing, False
        self.actors = {"stock GRPO": stock}
        self.rollout = rollout(args, args.scale)
        self.tokens = sum(len(s.sequences[0]) for s in self.rollout)
        eta = self.prepare_log_probs(selective)
        self.trainers = {}
        # The last is only looked at for what its statistics cost.
        self.actors["observed stock GRPO"] = stock
        for variant in (*VARIANTS, "observed stock GRPO"):
            own = copy.copy(strategy)
            own.args = copy.deepcopy(self.flags)
            own.args.algo.ar.alpha = 0.3 if "AR" in variant else 0.0
            own.args.algo.lopti.eta = eta if "Lopti" in variant else None
            actor = self.actors.setdefault(variant, selective)
            trainer = ppo_actor.ActorPPOTrainer if variant == "stock GRPO" else TokenUpdateTrainer
            self.trainers[variant] = trainer(
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
        actor.defers_log_probs = getattr(trainer, "defers_log_probs", False)
        synchronize()
        start = time.perf_counter()
        for sample, log_probs in zip(samples, self.old_log_probs(actor, samples), strict=True):
            sample.action_log_probs = log_probs
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
            sample.base_action_log_probs = torch.full(sample.action_mask.shape, -math.log(VOCABULARY))
        return samples

    def peak_memory(self) -> dict[str, float]:
        """GiB that a step of each variant reaches: resident on the CPU, allocated on the GPU.

        The `floor` is a step on next to no tokens: weights, gradients, AdamW's state, and what DeepSpeed's own step
        takes. As all share the engine, it is the same for all.
        """
        peaks = {}
        self.step("GRPO", self.fraction(0.01))  # the first step allocates
        for name in ("floor", *VARIANTS):
            if cpu.uses_cpu():
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            else:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self.step("GRPO", self.fraction(0.01)) if name == "floor" else self.step(name)
            if cpu.uses_cpu():
                status = Path("/proc/self/status").read_text().splitlines()
                peaks[name] = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
            else:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        return peaks

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

    def seconds_of_statistics(self) -> dict[str, float]:
        """Of all that `--logger.probability_stats` adds to an update, by variant.

        What follows the forward pass is timed in an update. In the selective one, the head also sums up its blocks of
        logits with entropies and squares instead of without: that difference is timed on one block, by turns.
        """
        # The first pass of Lopti is on-policy, and computes the high group too.
        rows = int(sum(s.action_mask.sum().item() for s in self.rollout) * (2 - LOW_SHARE))
        return {
            "stock GRPO": self._seconds_of_observer("observed stock GRPO"),
            "AR + Lopti": self._seconds_of_observer("AR + Lopti") + rows * seconds_of_statistics_per_row(),
        }

    def _seconds_of_observer(self, variant: str) -> float:
        from arlopti_openrlhf.forward.selective_actor import replaced_attribute

        observer, seconds = self.trainers[variant].observer, [0.0]

        def timed(function):
            def call(*args) -> None:
                synchronize()
                start = time.perf_counter()
                function(*args)
                synchronize()
                seconds[0] += time.perf_counter() - start

            return call

        with (
            replaced_attribute(observer, "_record", timed(observer._record)),
            replaced_attribute(observer, "measure", timed(observer.measure)),
        ):
            self.step(variant)
        return seconds[0]

    def operations(self, lopti: bool) -> float:
        """FLOPs of the published method on real tokens: forward 2, forward and backward 6 per weight and token."""
        shape = SHAPES[self.args.shape]
        width, layers = shape["hidden_size"], shape["num_hidden_layers"]
        kv = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
        weights = layers * (2 * width * (width + kv) + 3 * width * shape["intermediate_size"]) + width * VOCABULARY
        # Attention: two products of width x (half the length, on average) per token and layer.
        attention = sum(layers * 2 * width * len(s.sequences[0]) ** 2 / 2 for s in self.rollout)
        return (2 + 6 * (2 if lopti else 1)) * (weights * self.tokens + attention)

    def describe(self) -> str:
        prompt = sum(s.sequences.shape[1] - s.action_mask.sum().item() for s in self.rollout)
        return (
            f"Qwen2.5-{self.args.shape.upper()} shape, {len(self.rollout)} responses to {len(self.rollout) // 8} "
            f"prompts, {self.tokens} tokens ({prompt} of prompts), {self.args.mini_batches} optimizer steps, "
            f"lengths of K&K x {self.args.scale:.4g}{', packed' if self.args.packing else ''}"
        )


def seconds_of_statistics_per_row() -> float:
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
    return statistics.median(differences) * VOCABULARY / logits.numel()


def training_flags(args: argparse.Namespace) -> SimpleNamespace:
    """OpenRLHF's nested arguments, from the real parser: GRPO as in the paper."""
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    size = args.prompts * SAMPLES_PER_PROMPT
    flags = hierarchize(
        parse(
            f"--actor.model_name_or_path {args.model} --actor.num_gpus_per_node 1 --actor.adam.lr 0 "
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


def make_model(shape: str, folder: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=8192, **SHAPES[shape]
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def rollout(args: argparse.Namespace, scale: float) -> list:
    """Single samples in rollout order, in K&K's lengths: prompts of 250-400, responses log-normal around 600.

    A prompt's responses have the lengths at the distribution's eighths (σ = 0.5, cut to 100-1,500): the few that fit a
    benchmark then stand for all, padding included.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    lengths, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.prompts * args.mini_batches):
        length = max(1, int(scale * torch.randint(250, 401, (1,), generator=lengths)))
        prompt = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        for i in range(SAMPLES_PER_PROMPT):
            tokens = 600 * math.exp(0.5 * statistics.NormalDist().inv_cdf((i + 0.5) / SAMPLES_PER_PROMPT))
            tokens = max(2, int(scale * min(1500, max(100, tokens))))
            sequence = torch.cat([prompt, torch.randint(0, VOCABULARY, (1, tokens), generator=generator)], dim=1)
            mask = torch.zeros(1, sequence.shape[1] - 1, dtype=torch.long)
            mask[:, length - 1 :] = 1
            samples.append(
                Experience(
                    sequences=sequence,
                    attention_mask=torch.ones_like(sequence),
                    action_mask=mask,
                    rollout_log_probs=torch.zeros(mask.shape),
                    advantages=torch.randn(1, 1, generator=generator).expand(mask.shape).clone(),
                    returns=torch.zeros(mask.shape),
                    total_length=torch.tensor([float(sequence.shape[1])]),
                    response_length=torch.tensor([float(tokens)]),
                    info={"reward": torch.zeros(1)},
                )
            )
    return samples


def keep_freed_memory(keep: bool) -> None:
    """Whether C's allocator keeps what tensors free for the next ones, as it does by itself, or returns it at once.

    Only then is resident memory what is in use, whatever ran before; it costs time, in page faults.
    """
    if cpu.uses_cpu():
        mmap_threshold, trim_threshold = -3, -1  # of mallopt; glibc arrives at the first values by itself
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**25 if keep else 2**20)
        ctypes.CDLL(None).mallopt(trim_threshold, 2**26 if keep else 2**17)


def matrix_product_rate() -> float:
    """FLOP/s of this machine's matrix products, in the type that the update computes in: median of several."""
    device, dtype = torch.cuda.current_device(), torch.bfloat16
    if cpu.uses_cpu() and not cpu.multiplies_bf16():
        dtype = torch.float32
    size = 2048 if cpu.uses_cpu() else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        synchronize()
        start = time.perf_counter()
        a @ b
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[2:])


def synchronize() -> None:
    if not cpu.uses_cpu():
        torch.cuda.synchronize()


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def machine() -> dict:
    import importlib.metadata
    import platform

    packages = ("torch", "transformers", "deepspeed", "openrlhf")
    processor = platform.processor() or platform.machine()
    if cpu.uses_cpu():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
        processor += f", {os.cpu_count()} cores"
    else:
        processor = torch.cuda.get_device_name()
    return dict(processor=processor, python=platform.python_version()) | {
        name: importlib.metadata.version(name) for name in packages
    }


def table(results: dict[str, dict]) -> str:
    lines = ["| | time | seconds (min - max) | tokens/s | MFU | peak memory | GiB |", "|---|---|---|---|---|---|---|"]
    for variant, r in results.items():
        lines.append(
            f"| {variant} | {r['time_ratio']:.2f} | {r['seconds']:.2f} ({r['spread'][0]:.2f} - {r['spread'][1]:.2f}) "
            f"| {r['tokens_per_s']:,.0f} | {r['mfu']:.2f} " + f"| {r['memory_ratio']:.2f} | {r['memory_gib']:.1f} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    for offset, name, label in ((-0.2, "time_ratio", "time"), (0.2, "memory_ratio", "peak memory")):
        bars = axes.bar(
            [i + offset for i in range(len(results))], [r[name] for r in results.values()], 0.38, label=label
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), results.keys())
    axes.set_ylabel("stock GRPO = 1")
    axes.set_title(title, fontsize=8)
    axes.set_ylim(0, 1.25)
    axes.legend(frameon=False, loc="upper right", ncol=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
