"""What is measured of the update: rounds of steps, and what follows from their seconds and memory."""

import statistics
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from hardware import synchronize
from operations import LOW_SHARE, PACKED, STOCK, operations, update_passes
from rollouts import SHAPES, published_operations, unpadded
from update_bench import Bench

from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.update import trainer
from arlopti_openrlhf.update.plan import WHOLE
from arlopti_openrlhf.update.sample import numbered
from arlopti_openrlhf.update.token_statistics import UpdateStatistics

OPTIMIZER_SHARE = 0.1  # of stock's update in `choose_scale`, at most


def floor(bench: Bench) -> float:
    """GiB of a step on next to no tokens: weights, gradients, AdamW's state, and what DeepSpeed's own step takes.

    As all variants share the engine, it is the same for all.
    """
    bench.step("GRPO", bench.fraction(0.01))  # the first step allocates
    return bench.peak("GRPO", bench.fraction(0.01))


def time_in_turn(bench: Bench, rounds: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Seconds of each step, by variant. A round names the variants that take turns in it."""
    seconds: dict[str, list[float]] = {variant: [] for variants in rounds for variant in variants}
    for i, variants in enumerate(rounds):
        for variant in variants:
            seconds[variant].append(bench.step(variant))
        print(f"  {i + 1}: " + ", ".join(f"{v} {seconds[v][-1]:.2f} s" for v in variants), flush=True)
    return seconds


def growth(bench: Bench, variants: Sequence[str], sizes: Sequence[float]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, seconds) of each variant at each size, which is a factor on the lengths of the rollout batch."""
    points: dict[str, list[tuple[int, float]]] = {variant: [] for variant in variants}
    for size in sizes:
        samples = bench.fraction(size)
        tokens = sum(s.sequences.shape[1] for s in samples)
        for variant in variants:
            points[variant].append((tokens, bench.step(variant, samples)))
    return points


def seconds_of_statistics(bench: Bench) -> dict[str, float]:
    """What `--logger.probability_stats` adds to an update, by variant.

    What follows the forward pass is timed in an update. In the selective one the head also sums up its blocks of
    logits with entropies and squares. What that adds is timed on one block, with and without by turns.
    """
    # The first pass of Lopti is on-policy, and computes the high group too.
    rows = int(sum(s.action_mask.sum().item() for s in bench.rollout) * (2 - LOW_SHARE))
    per_row = seconds_of_statistics_per_row(SHAPES[bench.args.shape].vocab_size)
    return {
        "AR + Lopti": seconds_of_observing(bench, "AR + Lopti") + rows * per_row,
    }


def seconds_of_observing(bench: Bench, variant: str) -> float:
    """What follows the forward pass in one update: derivatives and sums."""
    seconds = [0.0]

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
        replaced_attribute(trainer, "token_updates", timed(trainer.token_updates)),
        patch.object(UpdateStatistics, "add", timed(UpdateStatistics.add)),
    ):
        bench.step(variant)
    return seconds[0]


def seconds_of_statistics_per_row(vocabulary: int) -> float:
    """What entropies and squares add to the sums over one row of the vocabulary's logits."""
    from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS, _arithmetic

    device, rows = torch.cuda.current_device(), 512
    logits = torch.randn(rows, BLOCK_ELEMENTS // rows, device=device)
    targets = torch.zeros(rows, dtype=torch.long, device=device)
    differences = []
    for _ in range(9):
        durations = []
        for with_statistics in (False, True):
            block = logits.clone()
            synchronize()
            start = time.perf_counter()
            _arithmetic(logits.device.type).sum_up(block, targets, 1.0, with_statistics)
            synchronize()
            durations.append(time.perf_counter() - start)
        differences.append(durations[1] - durations[0])
    return statistics.median(differences) * vocabulary / logits.numel()


def summary(
    bench: Bench, seconds: dict[str, list[float]], memory: dict[str, float], rate: float
) -> dict[str, dict[str, float | list[float] | None]]:
    """The figures of each variant in `seconds`. `packed_...` are ratios to packed stock, the others to stock.

    Model FLOPs utilisation (MFU) is logical or of the hardware. Logical MFU counts the published method's operations,
    on each response with its prompt, whether a variant computes them or not. Hardware MFU counts what it does compute.
    A figure is None where what it takes was not measured or counted.

    Args:
        seconds: by variant, one for each round.
        memory: GiB by variant.
        rate: FLOP/s of the machine's matrix products.
    """
    computed, results = computed_operations(bench), {}
    for variant, times in seconds.items():
        middle, passes = statistics.median(times), 2 if "Lopti" in variant else 1
        results[variant] = dict(
            seconds=middle,
            spread=[min(times), max(times)],
            time_ratio=_ratio(times, seconds.get(STOCK)),
            packed_time_ratio=_ratio(times, seconds.get(PACKED)),
            tokens_per_s=bench.tokens / middle,
            logical_mfu=published_operations(bench.args.shape, bench.lengths, passes) / middle / rate,
            hardware_mfu=computed[variant] / middle / rate if variant in computed else None,
            optimizer_seconds=bench.optimizer_seconds[variant],
            gradient_norm=bench.gradient_norms[variant],
            memory_gib=memory.get(variant),
            memory_ratio=_ratio([memory.get(variant)], [memory.get(STOCK)]),
            packed_memory_ratio=_ratio([memory.get(variant)], [memory.get(PACKED)]),
        )
    return results


def _ratio(values: Sequence[float | None], baseline: Sequence[float | None] | None) -> float | None:
    """Return the median ratio to the baseline of the same round."""
    ratios = [a / b for a, b in zip(values, baseline or (), strict=False) if a and b]
    return statistics.median(ratios) if ratios else None


def computed_operations(bench: Bench) -> dict[str, float]:
    """Return the operations that each variant computes in an update, of those that are counted (`operations`)."""
    items, shape = numbered(unpadded(bench.rollout)), SHAPES[bench.args.shape]
    passes = update_passes(items, bench.args.micro_batch_size)
    if bench.args.packing:
        passes[STOCK] = passes[PACKED]
    passes |= {"AR": passes["GRPO"], "Lopti": passes["AR + Lopti"]}
    checkpointing = bench.stock.model.module.is_gradient_checkpointing
    found = {}
    for variant, made in passes.items():
        repeats_layers = checkpointing and bench.levels.get(variant, WHOLE) == WHOLE
        found[variant] = sum(operations(shape, each, repeats_layers) for each in made)
    return found


def fit(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Divide an update's seconds into those per thousand tokens and those that no token changes, by least squares.

    Args:
        points: (tokens, seconds), at different sizes.

    Returns:
        `seconds_per_1000_tokens`, `fixed_seconds`, and `residual`: the greatest distance of a point from the line, as
        a share of the point's seconds.
    """
    tokens, seconds = [n / 1000 for n, _ in points], [s for _, s in points]
    slope, fixed = statistics.linear_regression(tokens, seconds)
    residual = max(abs(s - fixed - slope * n) / s for n, s in zip(tokens, seconds, strict=True))
    return dict(seconds_per_1000_tokens=slope, fixed_seconds=fixed, residual=residual)


def choose_scale(bench: Bench, minutes: float, updates: float) -> float:
    """Return the factor on K&K's lengths with which `updates` of stock GRPO take so many minutes.

    It is raised where the optimizer's steps would be more than a tenth of such an update.
    """
    little = bench.fraction(0.1)
    bench.step(STOCK, little)  # its first step compiles and allocates
    points = growth(bench, [STOCK], [0.1, 1])[STOCK]
    cost = fit(points)
    wanted = max(minutes * 60 / updates, bench.optimizer_seconds[STOCK] / OPTIMIZER_SHARE)
    tokens = 1000 * (wanted - cost["fixed_seconds"]) / cost["seconds_per_1000_tokens"]
    return bench.args.scale * max(1.0, tokens / points[-1][0])
