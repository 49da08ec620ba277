"""A batch as one row of tokens: what responses share, their prompt, is computed once, and padding not at all.

`pack` lays the row out as segments. Each attends to itself, causally, and to the whole of its prefix segment:
n responses to one prompt become [prompt, r1, ..., rn], the r's with the prompt as their prefix and positions that go
on from its end. Everything but attention works token by token, and needs to know nothing of it.
"""

import os
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Segment(NamedTuple):
    length: int
    prefix: int | None  # index of the segment that all its tokens see, or None


class PackedBatch:
    """What `pack` returns.

    Attributes:
        tokens: (1, L) token ids.
        positions: (1, L) position of each token in its own sequence.
        segments: of lengths that sum to L, in the row's order.
        rows: (N,) index in the row of the token that predicts each selected one.
        targets: (N,) the selected token ids.
        places: (N,) index of each selected token in the flattened (B, A) mask.
        was_attended: set by `segment_attention`: whether the model's attention went through it.
    """

    def __init__(self, tokens, positions, segments, rows, targets, places) -> None:
        self.tokens, self.positions, self.segments = tokens, positions, segments
        self.rows, self.targets, self.places = rows, targets, places
        self.was_attended = False
        self._masks: dict[tuple[int, int], Tensor] = {}

    def mask(self, length: int, prefix: int) -> Tensor:
        """(length, prefix + length), true where a token of a segment sees one of its prefix or of itself."""
        if (length, prefix) not in self._masks:
            mask = torch.ones(length, prefix + length, dtype=torch.bool, device=self.tokens.device)
            self._masks[length, prefix] = mask.tril_(diagonal=prefix)
        return self._masks[length, prefix]

    @cached_property
    def varlen(self) -> dict:
        """The layout as flash-attn's variable-length kernel takes it: a sequence per segment, its keys the prefix's
        and its own. `keys`: (K,) index in the row of each key; the rest are the kernel's arguments."""
        stops = list(accumulate(s.length for s in self.segments))
        spans = [range(stop - s.length, stop) for s, stop in zip(self.segments, stops, strict=True)]
        prefixes = [range(0) if s.prefix is None else spans[s.prefix] for s in self.segments]
        keys = [[*prefix, *own] for prefix, own in zip(prefixes, spans, strict=True)]
        key_lengths = [len(k) for k in keys]
        device = self.tokens.device
        return dict(
            keys=torch.tensor([i for k in keys for i in k], device=device),
            cu_seqlens_q=torch.tensor([0, *stops], device=device, dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, *accumulate(key_lengths)], device=device, dtype=torch.int32),
            max_seqlen_q=max(s.length for s in self.segments),
            max_seqlen_k=max(key_lengths),
        )


def pack(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, share: bool = True) -> PackedBatch:
    """Lays a padded batch out as one row of tokens.

    With `share`, the row holds the tokens that the selected ones depend on, and no more: sequences are cut after the
    last token that predicts a selected one, and common beginnings appear once. Without, every token of every sequence.

    Args:
        sequences: (B, T) token ids, padded on either side.
        attention_mask: (B, T), 1 on tokens, which are contiguous.
        action_mask: (B, A), A ≤ T - 1, nonzero where a log-prob is wanted; column j stands for token T - A + j.
        share: whether to cut and share.

    Returns:
        The packed batch. Where nothing is selected it holds one token, so that a model can run.
    """
    batch, length = sequences.shape
    first_target = length - action_mask.shape[1]
    selected = action_mask.bool()
    start = attention_mask.long().argmax(dim=1)
    if share:
        # Position t predicts token t + 1; nothing selected needs nothing.
        columns = torch.arange(action_mask.shape[1], device=sequences.device)
        last = torch.where(selected, columns, -1).amax(dim=1) if action_mask.shape[1] else start.new_full((batch,), -1)
        stop = torch.where(last >= 0, first_target + last, start)
        if not (last >= 0).any():
            stop[0] = start[0] + 1
    else:
        stop = start + attention_mask.long().sum(dim=1)

    # Sequences from their first token on, in lexicographic order: those that share most become neighbours.
    at = (start[:, None] + torch.arange(length, device=sequences.device)).clamp(max=length - 1)
    needed = torch.arange(length, device=sequences.device) < (stop - start)[:, None]
    aligned = torch.where(needed, sequences.gather(1, at), -1)
    lengths, rows_of_tokens = needed.sum(dim=1).tolist(), aligned.tolist()
    order = [row for row in range(batch) if lengths[row]]
    groups = [([row], 0) for row in order]
    if share:
        order.sort(key=rows_of_tokens.__getitem__)
        above, below = aligned[order[:-1]], aligned[order[1:]]
        common = ((above == below) & (above >= 0)).long().cumprod(dim=1).sum(dim=1).tolist()
        groups = [([order[i] for i in group], prefix) for group, prefix in _best_groups(common)]

    segments, tokens, positions = [], [], []
    # Per sequence: how much of it lies in a prefix, and where its tokens 0, 1, ... lie in the row, if they do
    # (`prefix_at`) and if they don't (`own_at`).
    shared, prefix_at, own_at = ([0] * batch for _ in range(3))
    total = 0
    for group, prefix in groups:
        if prefix:
            prefix_index, group_at = len(segments), total
            segments.append(Segment(prefix, None))
            tokens += rows_of_tokens[group[0]][:prefix]
            positions += range(prefix)
            total += prefix
        for row in group:
            shared[row], prefix_at[row], own_at[row] = prefix, group_at if prefix else 0, total - prefix
            own = lengths[row] - prefix
            if own:
                segments.append(Segment(own, prefix_index if prefix else None))
                tokens += rows_of_tokens[row][prefix : lengths[row]]
                positions += range(prefix, lengths[row])
                total += own

    row, column = selected.nonzero(as_tuple=True)
    device = sequences.device
    position = first_target + column - 1 - start[row]
    shared, prefix_at, own_at = (torch.tensor(x, device=device)[row] for x in (shared, prefix_at, own_at))
    return PackedBatch(
        tokens=torch.tensor(tokens, device=device)[None],
        positions=torch.tensor(positions, device=device)[None],
        segments=segments,
        rows=torch.where(position < shared, prefix_at, own_at) + position,
        targets=sequences[row, first_target + column],
        places=row * action_mask.shape[1] + column,
    )


def _best_groups(common: list[int]) -> list[tuple[range, int]]:
    """Divides a sequence of rows into groups of neighbours such that sharing saves most tokens.

    A group of n rows whose beginnings agree over p tokens saves (n - 1) p.

    Args:
        common: of each row and the next, how many tokens they begin with in common.

    Returns:
        (indices of a group's rows, the length of its shared prefix: 0 for a row on its own), in order.
    """
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


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention within the segments of a packed row, and to their prefixes, by PyTorch's SDPA.

    Args:
        query: (1, heads, L, D).
        key, value: (1, heads or a divisor of them, L, D).
        packed: the layout of the row.
        scale: what products are multiplied by before the softmax.
        dropout: probability that an attention weight is dropped.

    Returns:
        (1, L, heads, D).
    """
    packed.was_attended = True
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    queries, keys, values = (x.split([s.length for s in packed.segments], dim=2) for x in (query, key, value))
    outputs = []
    for segment, q, k, v in zip(packed.segments, queries, keys, values, strict=True):
        mask = None
        if segment.prefix is not None:
            mask = packed.mask(segment.length, packed.segments[segment.prefix].length)
            k, v = torch.cat((keys[segment.prefix], k), dim=2), torch.cat((values[segment.prefix], v), dim=2)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def flash_segment_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, scale: float, dropout: float = 0.0
) -> Tensor:
    """`segment_attention` by flash-attn: one kernel for all segments, whose causal mask is aligned to the last key."""
    from flash_attn import flash_attn_varlen_func

    packed.was_attended = True
    layout = dict(packed.varlen)
    keys = layout.pop("keys")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, heads, D)
    deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"  # as transformers reads it
    return flash_attn_varlen_func(
        q, k[keys], v[keys], **layout, dropout_p=dropout, softmax_scale=scale, causal=True, deterministic=deterministic
    )[None]
