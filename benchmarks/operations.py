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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from arlopti_openrlhf import cpu

cpu.enable()

from openrlhf.trainer.ppo_utils.experience import make_experience_batch  # noqa: E402
from rollouts import SHAPES, Shape, rollout, unpadded  # noqa: E402

from arlopti_openrlhf.forward.shared_prompt import Segment, pack  # noqa: E402
from arlopti_openrlhf.update.plan import cost  # noqa: E402
from arlopti_openrlhf.update.sample import Sample, by_prompt, numbered  # noqa: E402

STOCK = "stock GRPO"  # as installed
PACKED = "packed stock GRPO"  # as with flash-attn: no padding
LOW_SHARE = 0.15  # of the tokens, which Lopti updates first
FORKING_SHARE = 0.2  # of the tokens, which 80/20 updates
SETTINGS = {
    "K&K's lengths": dict(prompts=16, micro_batch_size=8),
    "prompts of 8,192 tokens, responses of 1,024": dict(prompt_length=8192, response_length=1024),
    "prompts of 500 tokens, responses of 4,096, checkpointing": dict(
        prompt_length=500, response_length=4096, checkpointing=True
    ),
}
USUAL = dict(
    shape="0.5b",
    prompts=2,
    mini_batches=1,
    prompt_length=None,
    response_length=None,
    micro_batch_size=1,
    checkpointing=False,
)
MODELS = ("small", "0.5b", "1.5b", "3b")


@dataclass(frozen=True)
class Pass:
    """Holds what a pass over a rollout batch computes, summed over its micro-batches.

    Attributes:
        tokens: that go through the layers.
        pairs: of tokens of which one sees the other.
        head_tokens: that go through the LM head.
        head_gradients: of these, how many have a gradient.
        repeats_head: Whether the backward pass computes the LM head's logits again, of the tokens with a gradient.
        trains: Whether there is a backward pass.
    """

    tokens: int
    pairs: int
    head_tokens: int
    head_gradients: int
    repeats_head: bool = False
    trains: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the operations there, too")
    args = parser.parse_args()
    record = {}
    for setting, options in SETTINGS.items():
        settings = SimpleNamespace(**USUAL | options)
        items = numbered(unpadded(rollout(settings, scale=1.0)))
        tokens = sum(len(item.sequences) for item in items)
        updates = update_passes(items, settings.micro_batch_size)
        twice = update_passes(items, settings.micro_batch_size, steps=2)
        updates |= {f"{variant}, two steps": twice[variant] for variant in ("GRPO", "AR + Lopti")}
        counted = {
            model: {
                variant: sum(operations(SHAPES[model], each, settings.checkpointing) for each in passes)
                for variant, passes in updates.items()
            }
            for model in MODELS
        }
        if settings.checkpointing:  # ours does without where there is room
            for model, of_model in counted.items():
                for variant in ("GRPO", "AR + Lopti"):
                    passes = updates[variant]
                    of_model[f"{variant}, nothing twice"] = sum(operations(SHAPES[model], each) for each in passes)
        record[setting] = dict(settings=vars(settings) | {"tokens": tokens}, operations=counted)
        shared = tokens / cost(items)
        print(f"{setting}: {len(items)} responses, {tokens:,} tokens, {shared:.2f} times those with shared prompts\n")
        print(f"{table(counted)}\n")
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def update_passes(items: list[Sample], micro_batch_size: int, steps: int = 1) -> dict[str, list[Pass]]:
    """Return the passes of each update of a rollout batch, those for the old log-probs included.

    Args:
        items: single, unpadded, numbered samples in rollout order.
        micro_batch_size: of OpenRLHF's updates.
        steps: optimizer steps in each pass. What they are does not matter to OpenRLHF's updates.
    """
    lengths = [len(item.sequences) for item in items]
    shuffled = [lengths[i] for i in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(3)).tolist()]
    # The old log-probs come in rollout order, and training shuffles the responses.
    in_order, mixed = (plain(padded(values, micro_batch_size)) for values in (lengths, shuffled))
    real = plain(lengths)
    response = [item.action_mask.bool() for item in items]
    low, forking = (chosen(response, share) for share in (LOW_SHARE, FORKING_SHARE))
    high = [mask & ~group for mask, group in zip(response, low, strict=True)]
    whole = shared(items, response, response)
    forward = partial(replace, trains=False)
    # The first pass computes the log-probs of all tokens of its first mini-batch, since they are π_old. Those of the
    # other mini-batches take a forward pass of their own, before the weights move.
    first = len(items) // steps
    others = [forward(shared(items[first:], response[first:], response[first:]))] if steps > 1 else []
    unlikely_first = [shared(items[:first], response[:first], low[:first])]
    if steps > 1:
        unlikely_first.append(shared(items[first:], low[first:], low[first:]))
    return {
        STOCK: [forward(in_order), mixed],
        "Lopti as published": [forward(in_order), mixed, mixed],
        PACKED: [forward(real), real],
        "GRPO": [*others, whole],
        "AR + Lopti": [*others, *unlikely_first, shared(items, high, high)],
        # Which tokens are the fifth with the greatest entropies, it has to know before.
        "80/20": [forward(whole), shared(items, forking, forking)],
    }


def padded(lengths: Sequence[int], micro_batch_size: int) -> list[int]:
    """Return the lengths of sequences in micro-batches of so many, padded to the longest of them."""
    starts = range(0, len(lengths), micro_batch_size)
    micro_batches = [lengths[i : i + micro_batch_size] for i in starts]
    return [max(micro_batch) for micro_batch in micro_batches for _ in micro_batch]


def plain(lengths: Sequence[int]) -> Pass:
    """Return OpenRLHF's pass over sequences of these lengths, with the logits of every token."""
    return Pass(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), sum(lengths), sum(lengths))


def shared(items: list[Sample], computed: Sequence[Tensor], updated: Sequence[Tensor]) -> Pass:
    """Return the selective update's pass, with a micro-batch for each prompt.

    Args:
        items: single, unpadded samples, those of a prompt one after the other.
        computed: (A,) masks of the tokens whose log-probs the pass computes.
        updated: (A,) masks of those that it updates.
    """
    masks, tokens, pairs = iter(computed), 0, 0
    for samples in by_prompt(items):
        batch = make_experience_batch([replace(sample, action_mask=next(masks).long()) for sample in samples])
        packed = pack(batch.sequences, batch.attention_mask, batch.action_mask)
        tokens += packed.tokens.shape[1]
        pairs += visible_pairs(packed.segments)
    head_tokens, head_gradients = (sum(int(mask.sum()) for mask in masks) for masks in (computed, updated))
    return Pass(tokens, pairs, head_tokens, head_gradients, repeats_head=True)


def visible_pairs(segments: Sequence[Segment]) -> int:
    """Return in how many pairs of tokens of a packed row one sees the other."""
    own = sum(s.length * (s.length + 1) // 2 for s in segments)
    return own + sum(s.length * segments[s.prefix].length for s in segments if s.prefix is not None)


def chosen(response: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return (A,) masks of so many of the response tokens, chosen at random."""
    generator = torch.Generator().manual_seed(2)
    return [mask & (torch.rand(mask.shape, generator=generator) < share) for mask in response]


def operations(shape: Shape, of: Pass, checkpointing: bool = False) -> int:
    """Return the operations of a pass.

    Args:
        shape: of the model.
        of: the pass.
        checkpointing: whether a backward pass repeats the layers' forward pass.
    """
    forwards = 2 if of.trains and checkpointing else 1
    layers = shape.layer_weights * of.tokens
    attention = 2 * shape.hidden_size * shape.num_hidden_layers * of.pairs  # one product
    total = forwards * (2 * layers + 2 * attention) + 2 * shape.head_weights * of.head_tokens
    if of.trains:
        total += 4 * layers + 5 * attention + (6 if of.repeats_head else 4) * shape.head_weights * of.head_gradients
    return total


def table(counted: dict[str, dict[str, float]]) -> str:
    """Return Markdown: each update's operations as a share of stock's (of packed stock's), a column for each model."""
    lines = ["| | " + " | ".join(SHAPES[model].name for model in counted) + " |", "|---" * (1 + len(counted)) + "|"]
    for variant in next(iter(counted.values())):
        shares = [f"{n[variant] / n[STOCK]:.2f} ({n[variant] / n[PACKED]:.2f})" for n in counted.values()]
        lines.append(f"| {variant} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
