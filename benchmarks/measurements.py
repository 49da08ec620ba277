"""What is measured of the update: rounds of steps, and what follows from their seconds and memory."""

import statistics
from collections.abc import Sequence

from operations import PACKED, STOCK
from update_bench import Bench


def floor(bench: Bench) -> float:
    """GiB of a step on next to no tokens: weights, gradients, AdamW's state, and what DeepSpeed's own step takes.

    As all variants share the engine, it is the same for all.
    """
    bench.step("GRPO", bench.fraction(0.01))  # the first step allocates
    return bench.peak("GRPO", bench.fraction(0.01))


def time_in_turn(bench: Bench, variants: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by variant. The variants take turns."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for i in range(rounds):
        for variant in variants:
            seconds[variant].append(bench.step(variant))
        print(f"  {i + 1}: " + ", ".join(f"{v} {seconds[v][-1]:.2f} s" for v in variants), flush=True)
    return seconds


def summary(
    bench: Bench, seconds: dict[str, list[float]], memory: dict[str, float]
) -> dict[str, dict[str, float | list[float] | None]]:
    """Return the figures of each variant in `seconds`. `packed_...` are ratios to packed stock, the others to stock.

    A figure is None if one of those that it is made of was not measured.

    Args:
        seconds: by variant, one for each round.
        memory: GiB by variant.
    """
    results = {}
    for variant, times in seconds.items():
        middle = statistics.median(times)
        results[variant] = dict(
            seconds=middle,
            spread=[min(times), max(times)],
            time_ratio=_ratio(times, seconds.get(STOCK)),
            packed_time_ratio=_ratio(times, seconds.get(PACKED)),
            tokens_per_s=bench.tokens / middle,
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
