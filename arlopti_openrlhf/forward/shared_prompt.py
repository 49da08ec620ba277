"""A batch as one row of tokens: a prompt that responses share is computed once, and padding is not computed.

`pack` lays the row out as segments. Each attends to itself, causally, and to the whole of its prefix segment
(`segment_attention`). So n responses to one prompt become [prompt, r1, ..., rn], where the prompt is the prefix of
each r, and the positions of each r go on from the prompt's end. Everything but attention works token by token and
needs no change.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class Segment(NamedTuple):
    """A run of tokens in the packed row."""

    length: int
    prefix: int | None  # index of the segment that all its tokens see, or None


@dataclass(eq=False)
class PackedBatch:
    """Holds a batch as `pack` lays it out."""

    tokens: Tensor  # (1, L) token ids
    positions: Tensor  # (1, L) position of each token in its own sequence
    segments: list[Segment]  # in the order of the row; their lengths sum to L
    rows: Tensor  # (N,) index in the row of the token that predicts each selected one
    targets: Tensor  # (N,) the selected token ids
    places: Tensor  # (N,) index of each selected token in the flattened (B, A) mask
    was_attended: bool = False  # whether an attention layer of the model got the row; set by that layer

    @cached_property
    def stops(self) -> list[int]:
        """The index in the row behind the last token of each segment."""
        return list(accumulate(segment.length for segment in self.segments))

    @cached_property
    def varlen(self) -> tuple[Tensor, dict]:
        """The layout for flash-attn's variable-length kernel, which takes each segment as a sequence of its own.

        First the (K,) index in the row of each key: a segment's keys are its prefix's and its own. Then keyword
        arguments of transformers' `flash_attention_forward`.
        """
        spans = [range(stop - s.length, stop) for s, stop in zip(self.segments, self.stops, strict=True)]
        prefixes = [range(0) if s.prefix is None else spans[s.prefix] for s in self.segments]
        keys = [[*prefix, *own] for prefix, own in zip(prefixes, spans, strict=True)]
        key_lengths = [len(k) for k in keys]
        device = self.tokens.device
        return torch.tensor([i for k in keys for i in k], device=device), dict(
            cu_seq_lens_q=torch.tensor([0, *self.stops], device=device, dtype=torch.int32),
            cu_seq_lens_k=torch.tensor([0, *accumulate(key_lengths)], device=device, dtype=torch.int32),
            max_length_q=max(s.length for s in self.segments),
            max_length_k=max(key_lengths),
        )

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
        The packed batch. Where nothing is selected it holds one token, so that a model can run.
    """
    length, width, device = sequences.shape[1], action_mask.shape[1], sequences.device
    start, stop = _needed_spans(attention_mask, action_mask, share)

    # Move every sequence to the left edge: there, beginnings compare column by column.
    steps = torch.arange(length, device=device)
    needed = steps < (stop - start)[:, None]
    aligned = torch.where(needed, sequences.gather(1, (start[:, None] + steps).clamp(max=length - 1)), -1)
    rows, lengths = aligned.tolist(), needed.sum(dim=1).tolist()

    order = [row for row in range(len(rows)) if lengths[row]]
    groups = _sharing_groups(aligned, rows, order) if share else [([row], 0) for row in order]
    layout = _lay_out(rows, lengths, groups)

    # Find where in the row each selected token is predicted: in the shared prefix, or in the sequence's own segment.
    row, column = action_mask.bool().nonzero(as_tuple=True)
    target = length - width + column
    position = target - 1 - start[row]
    shared, prefix_at, own_at = (
        torch.tensor(x, device=device)[row] for x in (layout.shared, layout.prefix_at, layout.own_at)
    )
    return PackedBatch(
        tokens=torch.tensor(layout.tokens, device=device)[None],
        positions=torch.tensor(layout.positions, device=device)[None],
        segments=layout.segments,
        rows=torch.where(position < shared, prefix_at, own_at) + position,
        targets=sequences[row, target],
        places=row * width + column,
    )


def _needed_spans(attention_mask: Tensor, action_mask: Tensor, share: bool) -> tuple[Tensor, Tensor]:
    """Return the (B,) first columns of the tokens to compute and the (B,) columns behind the last of them."""
    start = attention_mask.long().argmax(dim=1)
    if not share:
        return start, start + attention_mask.long().sum(dim=1)
    (batch, length), width = attention_mask.shape, action_mask.shape[1]
    # Position t predicts token t + 1. A sequence with nothing selected needs no token.
    columns = torch.arange(width, device=start.device)
    last = torch.where(action_mask.bool(), columns, -1).amax(dim=1) if width else start.new_full((batch,), -1)
    stop = torch.where(last >= 0, length - width + last, start)
    if not (last >= 0).any():
        stop[0] = start[0] + 1
    return start, stop


def _sharing_groups(aligned: Tensor, rows: list[list[int]], order: list[int]) -> list[tuple[list[int], int]]:
    """Divide the rows named by `order` into groups that share a beginning.

    Args:
        aligned: (B, T) token ids from the left edge, -1 behind the last.
        rows: The same as lists.
        order: Indices of the rows that have tokens.

    Returns:
        The groups as (indices of the rows, length of their shared beginning, 0 for a row on its own).
    """
    # In lexicographic order the rows that share most are neighbours.
    order = sorted(order, key=rows.__getitem__)
    above, below = aligned[order[:-1]], aligned[order[1:]]
    common = ((above == below) & (above >= 0)).long().cumprod(dim=1).sum(dim=1).tolist()
    return [([order[i] for i in group], prefix) for group, prefix in _best_groups(common)]


class _Layout(NamedTuple):
    """The packed row, and where each sequence lies in it."""

    tokens: list[int]
    positions: list[int]
    segments: list[Segment]
    shared: list[int]  # per sequence: how many of its tokens lie in a prefix
    prefix_at: list[int]  # where its token 0 lies in the row, if it lies in a prefix
    own_at: list[int]  # where token 0 would lie if the sequence's own segment began with it


def _lay_out(rows: list[list[int]], lengths: list[int], groups: list[tuple[list[int], int]]) -> _Layout:
    """Put the groups one after the other: the beginning that a group shares, then what each sequence adds to it."""
    segments: list[Segment] = []
    tokens: list[int] = []
    positions: list[int] = []
    shared, prefix_at, own_at = ([0] * len(rows) for _ in range(3))
    for group, prefix in groups:
        prefix_index, group_at = len(segments), len(tokens)
        if prefix:
            segments.append(Segment(prefix, None))
            tokens += rows[group[0]][:prefix]
            positions += range(prefix)
        for row in group:
            shared[row], prefix_at[row], own_at[row] = prefix, group_at, len(tokens) - prefix
            if lengths[row] > prefix:
                segments.append(Segment(lengths[row] - prefix, prefix_index if prefix else None))
                tokens += rows[row][prefix : lengths[row]]
                positions += range(prefix, lengths[row])
    return _Layout(tokens, positions, segments, shared, prefix_at, own_at)


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
