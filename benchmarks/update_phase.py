"""Old log-probs and update of one rollout batch: stock OpenRLHF 0.11.2's and ours in turn, on the same engine.

python benchmarks/update_phase.py [--shape 0.5b] [--scale 0.25] [--json results.json] [--chart chart.png]

What is timed is what an RL step does between the rollout and the weight sync, through OpenRLHF's own trainer class and
a DeepSpeed engine of one rank: the forward passes for the old log-probs, then `ppo_train`. Random weights in a
published model's shape, learning rate 0, so that every run computes the same. Peak memory is measured in a
round of its own, in which freed memory is given back at once.
"""

import argparse
import json
import logging
import shlex
import sys
from pathlib import Path

from arlopti_openrlhf import cpu

logging.disable(logging.WARNING)
cpu.enable()

from hardware import keep_freed_memory, machine  # noqa: E402
from measurements import floor, summary, time_in_turn  # noqa: E402
from operations import PACKED, STOCK  # noqa: E402
from rollouts import SHAPES, make_model  # noqa: E402
from update_bench import VARIANTS, WITHOUT_STATISTICS, Bench, default_attention  # noqa: E402
from update_tables import draw, table  # noqa: E402


def main() -> None:
    args = parse()
    keep_freed_memory(False)
    model = make_model(args.shape, default_attention())
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    bench = Bench(args, model, also=(WITHOUT_STATISTICS,))
    floor_gib = floor(bench)
    print(bench.describe(), flush=True)
    memory = {variant: bench.peak(variant) for variant in args.variants}
    keep_freed_memory(True)
    results = summary(bench, time_in_turn(bench, args.variants, args.repeats), memory)
    record = dict(
        command=f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        machine=machine(),
        settings=vars(args),
        description=bench.describe(),
        tokens=bench.tokens,
        floor_gib=floor_gib,
        variants=results,
    )
    report(record)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.chart:
        draw(results, args.chart, bench.describe())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_cpu = cpu.uses_cpu()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    scale = "factor on K&K's lengths (default: 1/40 on a CPU, 1 on a GPU)"
    parser.add_argument("--scale", type=float, default=1 / 40 if on_cpu else 1.0, help=scale)
    parser.add_argument("--prompt-length", type=int, help="tokens of every prompt, instead of K&K's lengths")
    parser.add_argument("--response-length", type=int, help="tokens of every response, instead of K&K's lengths")
    parser.add_argument("--prompts", type=int, default=2 if on_cpu else 8, help="per mini-batch, 8 responses each")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per rollout batch")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="responses")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="--actor.gradient_checkpointing_enable")
    variants = [STOCK, PACKED, "GRPO", "AR + Lopti", "80/20"]
    parser.add_argument("--variants", nargs="+", choices=(*VARIANTS, WITHOUT_STATISTICS), default=variants)
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--processor-time", action="store_true", help="count it, where others use the machine")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--chart", metavar="PATH")
    return parser.parse_args()


def report(record: dict) -> None:
    """Print everything that a reader needs."""
    print(table(record["variants"], record["floor_gib"]))
    print(f"{record['machine']['processor']}; matrix products in {record['machine']['products']}")
    stock = record["variants"].get(STOCK)
    if stock:
        share = stock["optimizer_seconds"] / stock["seconds"]
        print(f"the optimizer's steps took {stock['optimizer_seconds']:.2f} s of stock GRPO's update, {share:.0%}")
    print(f"an update of next to no tokens takes {record['floor_gib']:.1f} GiB. Memory without it is in brackets")


if __name__ == "__main__":
    main()
