"""Old log-probs and update of one rollout batch: stock OpenRLHF 0.11.2 beside ours, in turn, on the same engine.

python benchmarks/update_phase.py [--shape 0.5b] [--scale 0.0714] [--json results.json] [--chart chart.png]

What is timed is what an RL step does between the rollout and the weight sync, through OpenRLHF's own trainer class and
a DeepSpeed engine of one rank: the forward passes for the old log-probs, then `ppo_train`. Random weights in a
published model's shape, learning rate 0, so that every run computes the same. Peak memory is measured in a
round of its own, in which freed memory is given back at once.
"""

import argparse
import json
import logging
import statistics
from pathlib import Path

from arlopti_openrlhf import cpu

logging.disable(logging.WARNING)
cpu.enable()

from hardware import keep_freed_memory, machine, matrix_product_rate  # noqa: E402
from rollouts import SHAPES, make_model  # noqa: E402
from update_bench import Bench, default_attention, seconds_of_statistics, summary  # noqa: E402
from update_tables import draw, table  # noqa: E402


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
    bench = Bench(args, make_model(args.shape, default_attention()))
    print(bench.describe(), flush=True)
    memory = bench.peak_memory()
    keep_freed_memory(True)
    growth = bench.growth(args.sizes)
    seconds = bench.time_in_turn(args.repeats)
    growth.append(dict(tokens=bench.tokens, seconds=statistics.median(seconds["AR + Lopti"])))
    rate = matrix_product_rate()
    results = summary(bench, seconds, memory, rate)
    print(table(results))
    print(f"matrix products: {rate / 1e9:,.0f} GFLOP/s")
    print(f"AR itself takes {bench.seconds_of_reweighting() * 1e3:.2f} ms of its update")
    statistics_seconds = seconds_of_statistics(bench)
    statistics_share = {v: s / results[v]["seconds"] for v, s in statistics_seconds.items()}
    for variant, share in statistics_share.items():
        print(f"statistics by probability take {statistics_seconds[variant]:.3f} s of {variant}'s update, {share:.2%}")
    print(f"an update of next to no tokens takes {memory['floor']:.1f} GiB")
    print("AR + Lopti by tokens: " + ", ".join(f"{p['tokens']} in {p['seconds']:.2f} s" for p in growth))
    if args.json:
        record = dict(
            machine=machine(),
            settings=vars(args),
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


if __name__ == "__main__":
    main()
