"""Peak memory of an update over the length of responses, at a vocabulary of 151,936.

python benchmarks/memory_growth.py [--lengths 512 1024 2048 4096] [--json growth.json] [--chart docs/memory_growth.png]

OpenRLHF's issue #1047: the logits of all tokens take the memory. The model is small, so that little else does. Each
update has eight responses to one prompt of 500 tokens, which stock takes one by one.
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
from measurements import floor  # noqa: E402
from operations import PACKED, STOCK  # noqa: E402
from rollouts import SHAPES, make_model  # noqa: E402
from update_bench import Bench, default_attention  # noqa: E402

VARIANTS = (STOCK, PACKED, "GRPO", "AR + Lopti")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small-151936")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of responses")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--chart", metavar="PATH")
    given = parser.parse_args()
    keep_freed_memory(False)
    sizes = dict(prompts=1, mini_batches=1, micro_batch_size=1, prompt_length=500, scale=1.0)
    args = argparse.Namespace(shape=given.shape, response_length=given.lengths[0], **sizes)
    bench = Bench(args, make_model(args.shape, default_attention()), also=())
    record = dict(
        command=f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        machine=machine(),
        shape=SHAPES[args.shape].name,
        lengths=given.lengths,
        floor_gib=floor(bench),
        gib={variant: [] for variant in VARIANTS},
    )
    print("| tokens of a response | " + " | ".join(VARIANTS) + " |\n|---" + "|---" * len(VARIANTS) + "|")
    for length in given.lengths:
        args.response_length = length
        bench.take_lengths(1.0)
        for variant, found in record["gib"].items():
            found.append(bench.peak(variant))
        print(
            f"| {length:,} | " + " | ".join(f"{found[-1]:.2f}" for found in record["gib"].values()) + " |", flush=True
        )
    print(f"GiB. An update of next to no tokens takes {record['floor_gib']:.2f}.")
    if given.json:
        Path(given.json).write_text(json.dumps(record) + "\n", encoding="utf-8")
    if given.chart:
        draw(record, given.chart)


def draw(record: dict, path: str) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for i, (variant, found) in enumerate(record["gib"].items()):  # pairs of them lie on each other
        axes.plot(record["lengths"], found, marker="ox"[i % 2], linestyle=("-", "--")[i % 2], label=variant)
    axes.axhline(record["floor_gib"], color="grey", linestyle=":", label="next to no tokens")
    axes.set(xlabel="tokens of a response", ylabel="peak memory, GiB", ylim=(0, None), xticks=record["lengths"])
    axes.set_title(f"One update, {record['shape']}", fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
