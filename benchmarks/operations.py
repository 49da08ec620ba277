"""How many floating-point operations an update takes: OpenRLHF's, the published Lopti's, and ours.

python benchmarks/operations.py [--json operations.json]

Nothing is timed. Operations are counted from the lengths of the sequences, as each update computes them, so the result
is the same on every machine. Where two updates use the hardware equally well, the ratio of their operations is that of
their times. It is therefore what a benchmark of the time can reach, and what lies above it is lost on the way.

Counted are the products of matrices: two operations for each weight and token forward, four backward, and two more
where a forward pass is repeated (gradient checkpointing, and the selective update's LM head). Attention takes two
products forward and five backward for each pair of tokens of which one sees the other, as kernels of flash-attn's kind
compute it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from rollouts import SHAPES, Shape, rollout
from torch import Tensor

from arlopti_openrlhf.forward.shared_prompt import Segment, pack

LOW_SHARE = 0.15  # of the tokens that Lopti updates first
FORKING_SHARE = 0.2  # of the tokens that 80/20 updates
SETTINGS = {
    "K&K's lengths": dict(prompts=16, response_length=None, micro_batch_size=8, checkpointing=False),
    "4,096 tokens, checkpointing": dict(prompts=1, response_length=4096, micro_batch_size=1, checkpointing=True),
}
MODELS = ("small", "0.5b", "1.5b", "3b")


@dataclass(frozen=True)
class Products:
    """What one kind of pass computes, summed over its micro-batches.

    Attributes:
        tokens: that go through the layers.
        pairs: of tokens of which one sees the other.
        head_tokens: that go through the LM head.
        head_gradients: of these, how many have a gradient.
    """

    tokens: int
    pairs: int
    head_tokens: int
    head_gradients: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the operations there, too")
    args = parser.parse_args()
    record = {}
    for setting, options in SETTINGS.items():
        batch = SimpleNamespace(shape="0.5b", mini_batches=1, **options)
        samples = rollout(batch, scale=1.0)
        counted = {model: update_operations(SHAPES[model], samples, batch) for model in MODELS}
        record[setting] = dict(settings=vars(batch) | {"tokens": sum(length(s) for s in samples)}, operations=counted)
        print(f"{setting}: {len(samples)} responses, {record[setting]['settings']['tokens']:,} tokens\n")
        print(table(counted), end="\n\n")
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def update_operations(shape: Shape, samples: list, batch: SimpleNamespace) -> dict[str, float]:
    """Return the operations of each update of a rollout batch, the forward passes for the old log-probs included.

    Args:
        shape: of the model.
        samples: single samples in rollout order.
        batch: `micro_batch_size`, of OpenRLHF's updates, and `checkpointing`.
    """
    lengths = [length(s) for s in samples]
    shuffled = [lengths[i] for i in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(3)).tolist()]
    # The old log-probs come in rollout order, and training shuffles the responses.
    in_order, mixed = (padded(values, batch.micro_batch_size) for values in (lengths, shuffled))
    real = plain(lengths)
    low, forking = (chosen(samples, share) for share in (LOW_SHARE, FORKING_SHARE))
    response = [s.action_mask.bool() for s in samples]
    high = [mask & ~group for mask, group in zip(response, low, strict=True)]
    everything = shared(samples, response, response)

    def forward(products: Products) -> float:
        return operations(shape, products, forward_only=True)

    def train(products: Products, repeats_head: bool = False) -> float:
        return operations(shape, products, checkpointing=batch.checkpointing, repeats_head=repeats_head)

    def selective(computed: list[Tensor], updated: list[Tensor]) -> float:
        return train(shared(samples, computed, updated), repeats_head=True)

    return {
        "stock GRPO": forward(in_order) + train(mixed),
        "Lopti as published": forward(in_order) + 2 * train(mixed),
        "OpenRLHF, packing": forward(real) + train(real),
        # The first pass computes the log-probs of all tokens, since they are π_old.
        "GRPO": selective(response, response),
        "AR + Lopti": selective(response, low) + selective(high, high),
        # Which tokens are the fifth with the greatest entropies, it has to know before.
        "80/20": forward(everything) + selective(forking, forking),
    }


def padded(lengths: Sequence[int], micro_batch_size: int) -> Products:
    """Return what OpenRLHF computes of micro-batches of so many sequences, padded to the longest of them."""
    starts = range(0, len(lengths), micro_batch_size)
    micro_batches = [lengths[i : i + micro_batch_size] for i in starts]
    return plain([max(micro_batch) for micro_batch in micro_batches for _ in micro_batch])


def plain(lengths: Sequence[int]) -> Products:
    """Return what OpenRLHF computes of sequences of these lengths, each by itself, with the logits of every token."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return Products(sum(lengths), pairs, sum(lengths), sum(lengths))


def shared(samples: list, computed: list[Tensor], updated: list[Tensor]) -> Products:
    """Return what a pass of the selective update computes, with a micro-batch for each prompt.

    Args:
        samples: single samples in rollout order.
        computed: (1, A) masks of the tokens whose log-probs the pass computes.
        updated: (1, A) masks of those that it updates.
    """
    tokens = pairs = 0
    for rows in by_prompt(samples):
        masks = [computed[i] for i in rows]
        packed = pack(*padded_batch([samples[i].sequences for i in rows], masks))
        tokens += packed.tokens.shape[1]
        pairs += visible_pairs(packed.segments)
    return Products(tokens, pairs, *(sum(int(mask.sum()) for mask in masks) for masks in (computed, updated)))


def visible_pairs(segments: Sequence[Segment]) -> int:
    """Return in how many pairs of tokens of a packed row one sees the other."""
    own = sum(s.length * (s.length + 1) // 2 for s in segments)
    return own + sum(s.length * segments[s.prefix].length for s in segments if s.prefix is not None)


def operations(
    shape: Shape,
    products: Products,
    forward_only: bool = False,
    checkpointing: bool = False,
    repeats_head: bool = False,
) -> float:
    """Return the operations of a pass: forward, or forward and backward.

    Args:
        shape: of the model.
        products: what the pass computes.
        forward_only: whether there is no backward pass.
        checkpointing: whether the backward pass repeats the layers' forward pass.
        repeats_head: whether the backward pass repeats the LM head's, for the tokens with a gradient.
    """
    width, layers = shape.hidden_size, shape.num_hidden_layers
    key_width = width * shape.num_key_value_heads // shape.num_attention_heads
    weights = layers * (2 * width * (width + key_width) + 3 * width * shape.intermediate_size)
    head = width * shape.vocab_size
    times = 1 if forward_only else 1 + checkpointing  # the layers' forward pass
    total = 2 * times * weights * products.tokens + 2 * head * products.head_tokens
    total += 2 * times * 2 * width * layers * products.pairs
    if not forward_only:
        total += 4 * weights * products.tokens + (4 + 2 * repeats_head) * head * products.head_gradients
        total += 5 * 2 * width * layers * products.pairs
    return float(total)


def length(sample) -> int:
    return sample.sequences.shape[1]


def chosen(samples: list, share: float) -> list[Tensor]:
    """Return (1, A) masks of so many of the response tokens, chosen at random."""
    generator = torch.Generator().manual_seed(2)
    return [s.action_mask.bool() & (torch.rand(s.action_mask.shape, generator=generator) < share) for s in samples]


def by_prompt(samples: list) -> list[range]:
    """Return the indices of the samples of each prompt, which are neighbours."""
    starts = [i for i, s in enumerate(samples) if i == 0 or not torch.equal(prompt(s), prompt(samples[i - 1]))]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(samples)], strict=True)]


def prompt(sample) -> Tensor:
    return sample.sequences[0, : length(sample) - int(sample.action_mask.sum())]


def padded_batch(sequences: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids (B, T), attention mask (B, T) and action mask (B, T - 1), padded on the right."""
    width = max(s.shape[1] for s in sequences)

    def stack(rows: Sequence[Tensor], columns: int) -> Tensor:
        return torch.cat([torch.nn.functional.pad(row.long(), (0, columns - row.shape[1])) for row in rows])

    return stack(sequences, width), stack([torch.ones_like(s) for s in sequences], width), stack(masks, width - 1)


def table(counted: dict[str, dict[str, float]]) -> str:
    """Return Markdown: each update's operations as a share of stock's, a column for each model."""
    lines = ["| | " + " | ".join(SHAPES[model].name for model in counted) + " |", "|---" * (1 + len(counted)) + "|"]
    for variant in next(iter(counted.values())):
        ratios = [found[variant] / found["stock GRPO"] for found in counted.values()]
        lines.append(f"| {variant} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
