"""Old log-probs and update of one rollout batch: stock OpenRLHF 0.11.2's and ours in turn, on the same engine.

python benchmarks/update_phase.py [--minutes 15] [--shape 0.5b] [--json results.json] [--chart chart.png]

What is timed is what an RL step does between the rollout and the weight sync, through OpenRLHF's own trainer class and
a DeepSpeed engine of one rank: the forward passes for the old log-probs, then `ppo_train`. Random weights in a
published model's shape, learning rate 0, so that every run computes the same. Peak memory is measured in a
round of its own, in which freed memory is given back at once.
"""

import argparse
import json
import logging
import shlex
import statistics
import sys
from pathlib import Path

from arlopti_openrlhf import cpu

logging.disable(logging.WARNING)
cpu.enable()

from hardware import keep_freed_memory, machine, matrix_product_rate  # noqa: E402
from measurements import (  # noqa: E402
    choose_scale,
    fit,
    floor,
    growth,
    seconds_of_statistics,
    summary,
    time_in_turn,
)
from operations import PACKED, STOCK  # noqa: E402
from rollouts import SHAPES, make_model, unpadded  # noqa: E402
from update_bench import UNSHARED, VARIANTS, Bench, default_attention  # noqa: E402
from update_tables import draw, growth_table, table  # noqa: E402

from arlopti_openrlhf.update.plan import cost  # noqa: E402
from arlopti_openrlhf.update.sample import numbered  # noqa: E402

GROWTH = (STOCK, PACKED, "GRPO", "AR + Lopti")  # whose seconds are measured at four sizes


def main() -> None:
    args = parse()
    keep_freed_memory(False)
    model = make_model(args.shape, default_attention())
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    chosen = args.scale
    args.scale = chosen or (1 / 40 if cpu.uses_cpu() else 1.0)
    bench = Bench(args, model, also=(UNSHARED,))
    floor_gib = floor(bench)
    if chosen is None and cpu.uses_cpu():
        bench.take_lengths(choose_scale(bench, args.minutes, work(args)))
    print(bench.describe(), flush=True)
    memory = {variant: bench.peak(variant) for variant in args.variants}
    keep_freed_memory(True)
    growing = [variant for variant in GROWTH if variant in args.variants]
    grown = growth(bench, growing, args.sizes)
    seconds = time_in_turn(bench, [args.variants] * args.repeats)
    for variant, points in grown.items():
        points.append((bench.tokens, statistics.median(seconds[variant])))
    rate = matrix_product_rate()
    results = summary(bench, seconds, memory, rate)
    record = dict(
        command=f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        machine=machine(),
        settings=vars(args),
        description=bench.describe(),
        tokens=bench.tokens,
        matrix_flops_per_s=rate,
        floor_gib=floor_gib,
        tokens_without_repeats=cost(numbered(unpadded(bench.rollout))),
        variants=results,
        growth={variant: dict(points=points) | fit(points) for variant, points in grown.items()} if args.sizes else {},
    )
    if args.statistics:
        record["statistics_seconds"] = seconds_of_statistics(bench)
    report(record)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.chart:
        draw(results, args.chart, bench.describe())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_cpu = cpu.uses_cpu()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument(
        "--minutes", type=float, default=15, help="on a CPU: take as many tokens as this many minutes allow"
    )
    parser.add_argument("--scale", type=float, help="factor on K&K's lengths, instead of --minutes")
    parser.add_argument("--prompt-length", type=int, help="tokens of every prompt, instead of K&K's lengths")
    parser.add_argument("--response-length", type=int, help="tokens of every response, instead of K&K's lengths")
    parser.add_argument("--prompts", type=int, default=2 if on_cpu else 8, help="per mini-batch, 8 responses each")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per rollout batch")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="responses")
    parser.add_argument("--packing", action="store_true", help="--ds.packing_samples")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="--actor.gradient_checkpointing_enable")
    parser.add_argument(
        "--variants", nargs="+", choices=(*VARIANTS, UNSHARED), default=[STOCK, PACKED, "GRPO", "AR + Lopti", "80/20"]
    )
    parser.add_argument("--statistics", action="store_true", help="time what --logger.probability_stats adds, too")
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.25, 0.5, 0.75], help="growth: of --scale")
    parser.add_argument("--processor-time", action="store_true", help="count it, where others use the machine")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--chart", metavar="PATH")
    return parser.parse_args()


def work(args: argparse.Namespace) -> float:
    """How long the whole run takes, in updates of stock GRPO: about 0.5 for one of ours."""
    a_round = 1 + 0.5 * (len(args.variants) - 1)
    statistics_runs = 1.5 if args.statistics else 0
    return (1 + args.repeats) * a_round + sum(args.sizes) * 2 + statistics_runs


def report(record: dict) -> None:
    """Print everything that a reader needs."""
    print(table(record["variants"], record["floor_gib"]))
    if record["growth"]:
        print(growth_table(record["growth"]))
    processor, rate = record["machine"]["processor"], record["matrix_flops_per_s"] / 1e9
    bf16 = "" if record["machine"]["bf16_instructions"] else ", without bf16 instructions"
    print(f"{processor}{bf16}; matrix products: {rate:,.0f} GFLOP/s in {record['machine']['products']}")
    stock = record["variants"].get(STOCK)
    if stock:
        share = stock["optimizer_seconds"] / stock["seconds"]
        print(f"the optimizer's steps took {stock['optimizer_seconds']:.2f} s of stock GRPO's update, {share:.0%}")
    for variant, seconds in record.get("statistics_seconds", {}).items():
        if variant in record["variants"]:
            share = seconds / record["variants"][variant]["seconds"]
            print(f"statistics by probability take {seconds:.3f} s of {variant}'s update, {share:.2%}")
    print(f"an update of next to no tokens takes {record['floor_gib']:.1f} GiB. Memory without it is in brackets")
    if UNSHARED in record["variants"] and "GRPO" in record["variants"]:
        gain = record["variants"][UNSHARED]["seconds"] / record["variants"]["GRPO"]["seconds"]
        ideal = record["tokens"] / record["tokens_without_repeats"]
        print(f"sharing prompts makes GRPO {gain:.2f} times as fast, where {ideal:.2f} is ideal")


if __name__ == "__main__":
    main()
