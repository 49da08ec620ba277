"""A batch as one row of tokens: a prompt that responses share is computed once, and padding is not computed.

`pack` lays the row out as segments. Each attends to itself, causally, and to the whole of its prefix segment
(`segment_attention`). So n responses to one prompt become [prompt, r1, ..., rn], where the prompt is the prefix of
each r, and the positions of each r go on from the prompt's end. Everything but attention works token by token and
needs no change.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from arlopti_openrlhf.forward.transfer import on_device


class Segment(NamedTuple):
    """A run of tokens in the packed row."""

    length: int
    prefix: int | None  # index of the segment that all its tokens see, or None


@dataclass(eq=False)
class PackedBatch:
    """A batch as `pack` lays it out."""

    tokens: Tensor  # (1, L) token ids
    positions: Tensor  # (1, L) position of each token in its own sequence
    segments: list[Segment]  # in the order of the row; their lengths sum to L
    rows: Tensor  # (N,) index in the row of the token that predicts each selected one
    targets: Tensor  # (N,) the selected token ids
    places: Tensor  # (N,) index of each selected token in the flattened (B, A) mask
    # For kernels that take each segment as a sequence of its own, whose keys are its prefix's and its own:
    keys: Tensor  # (K,) index in the row of each key
    query_starts: Tensor  # (segments + 1,) int32, where the queries of each segment start, and their number
    key_starts: Tensor  # (segments + 1,) int32, where its keys do
    longest: tuple[int, int]  # the most queries and the most keys of a segment
    by_segments: bool  # whether a model attends by segments; else as upstream, to a packed or a padded batch
    was_attended: bool = False  # whether an attention layer of the model got the row; set by that layer
    trained: Tensor | None = None  # (n,) which of the selected tokens may have a gradient, None for all; set before it

    def to(self, device: torch.device) -> "PackedBatch":
        """Return the batch on the device, in one copy (`on_device`)."""
        return on_device([self], device)[0]

    @cached_property
    def stops(self) -> list[int]:
        """The index in the row behind the last token of each segment."""
        return list(accumulate(segment.length for segment in self.segments))

    @cached_property
    def block_mask(self) -> BlockMask:
        """The layout for FlexAttention, whose kernel skips the blocks of keys that no query of a block sees."""
        device, count = self.tokens.device, len(self.segments)
        lengths = torch.tensor([segment.length for segment in self.segments], device=device)
        segment_of = torch.arange(count, device=device).repeat_interleave(lengths)
        # A segment without a prefix has itself there, which changes nothing: a prefix lies before its followers.
        prefixes = [i if segment.prefix is None else segment.prefix for i, segment in enumerate(self.segments)]
        prefix_of = torch.tensor(prefixes, device=device)[segment_of]

        def sees(batch, head, query, key):
            own = segment_of[query] == segment_of[key]
            return (query >= key) & (own | (prefix_of[query] == segment_of[key]))

        length = self.tokens.shape[1]
        # Compiled, it looks at the tokens block by block. Otherwise a whole (L, L) mask is in memory for a moment.
        return create_block_mask(sees, None, None, length, length, device=device, _compile=device.type != "cpu")


def pack(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, share: bool = True) -> PackedBatch:
    """Lay a padded batch out as one row of tokens.

    With `share`, the row holds the tokens that the selected ones depend on, and no more: sequences are cut after the
    last token that predicts a selected one, and common beginnings appear once. Without, every token of every sequence.

    Args:
        sequences: (B, T) token ids, padded on either side.
        attention_mask: (B, T), 1 on tokens, which are contiguous.
        action_mask: (B, A), A ≤ T - 1, nonzero where a log-prob is wanted; column j stands for token T - A + j.
        share: Whether to cut and share.

    Returns:
        The packed batch, on the CPU. Where nothing is selected it holds one token, so that a model can run.
    """
    # By slices. On a GPU each of these small steps would wait for the one before.
    sequences, attention_mask, action_mask = sequences.cpu(), attention_mask.cpu(), action_mask.bool().cpu()
    (count, length), width = sequences.shape, action_mask.shape[1]

    # What each sequence has to compute. Position t predicts token t + 1.
    first = attention_mask.long().argmax(dim=1)
    stop = first + attention_mask.long().sum(dim=1)
    if share:
        last = torch.where(action_mask, torch.arange(length - width, length), 0).amax(dim=1) if width else 0 * first
        stop = torch.maximum(first, last)
        if not last.any():
            stop[0] = first[0] + 1
    starts, lengths = first.tolist(), (stop - first).tolist()
    rows = [sequences[i, start : start + n] for i, (start, n) in enumerate(zip(starts, lengths, strict=True))]

    # In lexicographic order the rows that share most are neighbours.
    order = [i for i in range(count) if lengths[i]]
    groups = [([i], 0) for i in order]
    if share:
        order.sort(key=lambda i: rows[i].numpy().astype(">i8").tobytes())
        common = [_common_length(rows[i], rows[j]) for i, j in pairwise(order)]
        groups = [([order[i] for i in group], prefix) for group, prefix in _best_groups(common)]

    # One group after the other: the beginning that it shares, then what each sequence adds to it. Of each sequence,
    # note how many tokens lie in a prefix, and where its first token lies, or would lie, in the prefix and in its own
    # segment.
    segments: list[Segment] = []
    tokens, positions, steps, total = [], [], torch.arange(length), 0
    offsets = torch.zeros(3, count, dtype=torch.long)

    def add(row: int, start: int, stop: int, prefix: int | None) -> None:
        nonlocal total
        segments.append(Segment(stop - start, prefix))
        tokens.append(rows[row][start:stop])
        positions.append(steps[start:stop])
        total += stop - start

    for group, prefix in groups:
        prefix_index, prefix_at = len(segments) if prefix else None, total
        if prefix:
            add(group[0], 0, prefix, None)
        for i in group:
            offsets[:, i] = torch.tensor([prefix, prefix_at, total - prefix])
            if lengths[i] > prefix:
                add(i, prefix, lengths[i], prefix_index)

    # Where in the row each selected token is predicted: in the shared prefix, or in the sequence's own segment.
    row, column = action_mask.nonzero(as_tuple=True)
    target = length - width + column
    position = target - 1 - first[row]
    shared, prefix_at, own_at = offsets[:, row]
    return PackedBatch(
        tokens=torch.cat(tokens)[None],
        positions=torch.cat(positions)[None],
        segments=segments,
        rows=torch.where(position < shared, prefix_at, own_at) + position,
        targets=sequences[row, target],
        places=row * width + column,
        by_segments=share,
        **_keys(segments),
    )


def _keys(segments: list[Segment]) -> dict:
    """Return the fields of `PackedBatch` that lay out queries and keys for kernels of variable lengths."""
    lengths = [segment.length for segment in segments]
    own = torch.arange(sum(lengths)).split(lengths)
    keys = [k if s.prefix is None else torch.cat([own[s.prefix], k]) for s, k in zip(segments, own, strict=True)]
    key_lengths = [len(k) for k in keys]
    return dict(
        keys=torch.cat(keys),
        query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        key_starts=torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32),
        longest=(max(lengths), max(key_lengths)),
    )


def _common_length(a: Tensor, b: Tensor) -> int:
    """Return how many tokens two rows begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.byte().argmax()) if differs.any() else length


def _best_groups(common: list[int]) -> list[tuple[range, int]]:
    """Divide a sequence of rows into groups of neighbours such that sharing saves most tokens.

    A group of n rows whose beginnings agree over p tokens saves (n - 1) p.

    Args:
        common: How many tokens each row and the next begin with in common.

    Returns:
        The groups in order, as (indices of the rows, length of the shared prefix, 0 for a row on its own).
    """
    # best[i]: the most that rows 0 to i - 1 can save; cut[i]: where the last group of that division starts.
    count = len(common) + 1
    best, cut = [0] * (count + 1), [0] * (count + 1)
    for stop in range(1, count + 1):
        prefix = 0
        best[stop], cut[stop] = best[stop - 1], stop - 1
        for start in range(stop - 2, -1, -1):
            prefix = common[start] if start == stop - 2 else min(prefix, common[start])
            if not prefix:
                break
            saved = best[start] + (stop - start - 1) * prefix
            if saved > best[stop]:
                best[stop], cut[stop] = saved, start
    groups: list[tuple[range, int]] = []
    stop = count
    while stop:
        start = cut[stop]
        groups.append((range(start, stop), min(common[start : stop - 1], default=0)))
        stop = start
    return groups[::-1]
