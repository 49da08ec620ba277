"""What the layout of a batch saves: tokens that are computed, and one attention layer's time and memory.

python benchmarks/layout.py [--length 2048] [--prompt 300] [--rounds 3] [--json layout.json]

First come the tokens of 32 prompts with 8 responses each, in K&K's lengths, that an update computes in dynamic
batches: in OpenRLHF's, where responses that happen to lie in one micro-batch share their prompt, and in ours, which
keep prompts whole. Then one attention layer in the shape of Qwen2.5-0.5B computes 8 responses to one prompt, forward
and backward, in bf16. Each layout has a process of its own, and they take turns:

padded    a batch in which each response repeats its prompt, as OpenRLHF's
matrix    the packed row, under a boolean matrix of what each token sees
segments  the packed row by segments, as the update computes it
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_arithmetic import visible
from hardware import machine, synchronize
from rollouts import rollout, unpadded
from torch import Tensor
from torch.nn import functional as F

from arlopti_openrlhf import cpu
from arlopti_openrlhf.forward.segment_attention import segment_attention
from arlopti_openrlhf.forward.shared_prompt import pack

LAYOUTS = ("padded", "matrix", "segments")
HEADS, KEY_HEADS, WIDTH, RESPONSES = 14, 2, 64, 8
BUDGETS = (4_096, 8_192, 16_384, 32_768)  # tokens of a micro-batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest response (default: 2048)")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt (default: 300)")
    parser.add_argument("--rounds", type=int, default=3, help="the medians are reported (default: 3)")
    parser.add_argument("--layout", choices=LAYOUTS, help="measure one of them, once")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    cpu.enable()
    if args.layout:
        print(json.dumps(measure(args)))
        return
    record = dict(machine=machine(), settings=vars(args), tokens=tokens(), layouts={name: [] for name in LAYOUTS})
    for _ in range(args.rounds):
        for name, results in record["layouts"].items():
            flags = [f"--{flag}={getattr(args, flag)}" for flag in ("length", "prompt")]
            command = [sys.executable, __file__, f"--layout={name}", *flags]
            results.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    report(record)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def tokens() -> list[dict]:
    """Tokens that are computed for one rank's batch: without sharing, in OpenRLHF's dynamic batches, and in ours."""
    from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

    from arlopti_openrlhf.update.partition import cost, micro_batches

    sizes = SimpleNamespace(shape="0.5b", prompts=32, mini_batches=1, prompt_length=None, response_length=None)
    samples = unpadded(rollout(sizes, scale=1.0))
    random.Random(0).shuffle(samples)
    lengths = [len(item.sequences) for item in samples]
    rows = []
    for budget in BUDGETS:
        count = get_minimum_num_micro_batch_size(lengths, budget, 1, 1)
        partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        ours = micro_batches(samples, budget)
        rows.append(
            dict(
                budget=budget,
                all=sum(lengths),
                openrlhf=sum(cost([samples[i] for i in partition]) for partition in partitions),
                ours=sum(map(cost, ours)),
                openrlhf_batches=count,
                our_batches=len(ours),
            )
        )
    return rows


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds and peak memory of one layer's attention in one layout, the second time that it is computed."""
    ids, mask, actions = sequences(args)
    packed = pack(ids, mask, actions).to(torch.cuda.current_device())
    length = packed.tokens.shape[1] if args.layout != "padded" else ids.shape[1]
    batch = 1 if args.layout != "padded" else len(ids)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(batch, heads, length, WIDTH, generator=generator)
        .to(torch.cuda.current_device(), torch.bfloat16)
        .requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    before = peak_memory(reset=True)
    for _ in range(2):
        start = time.perf_counter()
        if args.layout == "segments":
            output = segment_attention(query, key, value, packed, WIDTH**-0.5)
        else:
            sees = visible(packed).to(query.device) if args.layout == "matrix" else None
            keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
            output = F.scaled_dot_product_attention(query, keys, values, attn_mask=sees, is_causal=sees is None)
        output.sum().backward()
        synchronize()
        seconds = time.perf_counter() - start
    return dict(tokens=batch * length, seconds=seconds, gib=peak_memory() - before)


def sequences(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask (B, S) and action mask (B, S - 1) of responses of half the longest length and more."""
    ids = torch.zeros(RESPONSES, args.prompt + args.length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(RESPONSES):
        stop = args.prompt + args.length - row * args.length // (2 * RESPONSES)
        ids[row, : args.prompt], ids[row, args.prompt : stop] = 1, 2 + row
        mask[row, :stop] = 1
    actions = mask[:, 1:].clone()
    actions[:, : args.prompt - 1] = 0
    return ids, mask, actions


def peak_memory(reset: bool = False) -> float:
    """GiB: the device's peak, or this process's highest resident memory."""
    if cpu.uses_cpu():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**30


def report(record: dict) -> None:
    """Print both tables."""
    print(
        "| tokens of a micro-batch | all | OpenRLHF's micro-batches, prompts shared | whole prompts | micro-batches |"
    )
    print("|---|---|---|---|---|")
    for row in record["tokens"]:
        print(
            f"| {row['budget']:,} | {row['all']:,} | {row['openrlhf']:,} ({row['openrlhf'] / row['all']:.2f}) "
            f"| {row['ours']:,} ({row['ours'] / row['all']:.2f}) | {row['openrlhf_batches']}, {row['our_batches']} |"
        )
    print("\n| layout | tokens | time | seconds (min - max) | GiB |\n|---|---|---|---|---|")
    stock = [r["seconds"] for r in record["layouts"]["padded"]]
    for name, results in record["layouts"].items():
        seconds = [r["seconds"] for r in results]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, stock, strict=True))
        print(
            f"| {name} | {results[0]['tokens']:,} | {ratio:.2f} | {statistics.median(seconds):.2f} "
            f"({min(seconds):.2f} - {max(seconds):.2f}) | {statistics.median(r['gib'] for r in results):.2f} |"
        )


if __name__ == "__main__":
    main()
