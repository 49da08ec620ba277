"""Attention over a packed row: each segment sees itself, causally, and the whole of its prefix (`shared_prompt`).

There is one way for each kind of attention that a model may be loaded with:
- flash-attn: one call of its variable-length kernel.
- SDPA on a CPU: no mask exists. The kernel gives the normaliser of each query's softmax along with its result. So what
  a query takes from the prefix and what it takes from its own segment are computed apart and put together, and all
  responses to a prompt see its tokens in one call.
- SDPA elsewhere: segment by segment, with PyTorch's causal mask that is aligned to the last key. Its kernels know that
  mask without a matrix in memory.
- FlexAttention: one compiled kernel for the row, which skips the blocks that no query of theirs sees.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from arlopti_openrlhf.forward.shared_prompt import PackedBatch
from arlopti_openrlhf.hardware import multiplies_bf16

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attend within the segments of a packed row, and to their prefixes, with PyTorch's SDPA.

    Args:
        query: (1, heads, L, D).
        key, value: (1, heads or a divisor of them, L, D).
        packed: The layout of the row.
        scale: What products are multiplied by before the softmax.
        dropout: Probability that an attention weight is dropped.

    Returns:
        (1, L, heads, D).
    """
    packed.was_attended = True
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if query.device.type == "cpu" and not dropout and value.shape == key.shape:
        dtype = query.dtype
        if dtype == torch.bfloat16 and not multiplies_bf16():
            # As `cpu.patches` does for all other attention. The kernel in emulated bf16 takes several times as long.
            query, key, value = query.float(), key.float(), value.float()
        return _SegmentAttention.apply(query, key, value, packed, scale).transpose(1, 2).to(dtype)
    lengths = [segment.length for segment in packed.segments]
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    outputs = []
    for segment, q, k, v in zip(packed.segments, queries, keys, values, strict=True):
        mask = None
        if segment.prefix is not None:
            k, v = torch.cat((keys[segment.prefix], k), dim=2), torch.cat((values[segment.prefix], v), dim=2)
            mask = causal_lower_right(q.shape[2], k.shape[2])
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


class _SegmentAttention(torch.autograd.Function):
    """Computes `segment_attention` by parts, each of them a range of queries that sees a range of keys.

    With s the scores of a query, its softmax over two parts is exp(s - n), where n = log(exp(n_1) + exp(n_2)) and n_1
    and n_2 are the parts' own normalisers. So the parts' results are added with weights exp(n_i - n). The kernel's
    backward reads exp(s - n), too, and gives each part's gradient where it gets n and the whole result.
    """

    @staticmethod
    def forward(ctx, query, key, value, packed, scale):
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        normaliser = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for queries, keys, is_causal in _parts(packed):
            q, (k, v) = query[:, :, queries], (x[:, :, keys] for x in (key, value))
            part, part_normaliser = _attend(q, k, v, 0.0, is_causal, scale=scale)
            if is_causal:  # comes first, of all queries
                output[:, :, queries], normaliser[:, :, queries] = part, part_normaliser
                continue
            both = torch.logaddexp(normaliser[:, :, queries], part_normaliser)
            own_weight = (normaliser[:, :, queries] - both).exp()[..., None]
            weight = (part_normaliser - both).exp()[..., None]
            output[:, :, queries] = (own_weight * output[:, :, queries] + weight * part).to(output.dtype)
            normaliser[:, :, queries] = both
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.packed, ctx.scale = packed, scale
        return output

    @staticmethod
    def backward(ctx, grad_output):
        query, key, value, output, normaliser = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
        for queries, keys, is_causal in _parts(ctx.packed):
            grads = _attend_backward(
                grad_output[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                normaliser[:, :, queries],
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            grad_query[:, :, queries] += grads[0]
            grad_key[:, :, keys] += grads[1]
            grad_value[:, :, keys] += grads[2]
        return grad_query, grad_key, grad_value, None, None


def _parts(packed: PackedBatch) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the ranges of queries, the range of keys that each sees, and whether it sees them causally.

    First come the segments, which see themselves. Then all segments of a prefix, which are neighbours, see the prefix.
    """
    stops = packed.stops
    spans = [slice(stop - segment.length, stop) for segment, stop in zip(packed.segments, stops, strict=True)]
    for span in spans:
        yield span, span, True
    followers: dict[int, slice] = {}
    for segment, span in zip(packed.segments, spans, strict=True):
        if segment.prefix is not None:
            first = followers.get(segment.prefix, span)
            followers[segment.prefix] = slice(first.start, span.stop)
    for prefix, queries in followers.items():
        yield queries, spans[prefix], False


def flash_segment_attention(
    flash_attention: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attend as `segment_attention` does, with flash-attn: one kernel for all segments.

    The kernel aligns its causal mask to the last key, so that each segment sees the whole of its prefix.

    Args:
        flash_attention: transformers' `flash_attention_forward`, which also decides what the kernel can take of
            `softcap`, `s_aux` (attention sinks) and the like. They are handed on in `kwargs` as the layer gave them.
        module: The attention layer.
        query: (1, heads, L, D).
        key, value: (1, heads or a divisor of them, L, D).
        packed: The layout of the row.

    Returns:
        (1, L, heads, D), and None in place of the attention weights.
    """
    packed.was_attended = True
    layout = dict(packed.varlen)
    keys = layout.pop("keys")
    key, value = (x.index_select(2, keys) for x in (key, value))
    return flash_attention(module, query, key, value, None, **layout, **kwargs)


def flex_segment_attention(
    flex_attention: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `segment_attention` does, with FlexAttention and one mask of blocks for all layers.

    Args:
        flex_attention: transformers' `flex_attention_forward`. The other arguments are those of
            `flash_segment_attention`.

    Returns:
        (1, L, heads, D), and transformers' second result.
    """
    packed.was_attended = True
    if packed.block_mask is None:
        packed.block_mask = block_mask(packed)
    return flex_attention(module, query, key, value, packed.block_mask, **kwargs)


def block_mask(packed: PackedBatch) -> BlockMask:
    """Return FlexAttention's mask of a packed row: what each token sees of its own segment and of its prefix."""
    device, count = packed.tokens.device, len(packed.segments)
    lengths = torch.tensor([segment.length for segment in packed.segments], device=device)
    segment_of = torch.arange(count, device=device).repeat_interleave(lengths)
    # A segment without a prefix has itself there, which changes nothing: a prefix lies before its followers.
    prefixes = [index if segment.prefix is None else segment.prefix for index, segment in enumerate(packed.segments)]
    prefix_of = torch.tensor(prefixes, device=device)[segment_of]

    def sees(batch, head, query, key):
        own = segment_of[query] == segment_of[key]
        return (query >= key) & (own | (prefix_of[query] == segment_of[key]))

    length = packed.tokens.shape[1]
    # Compiled, it looks at the tokens block by block. Otherwise a whole (L, L) mask is in memory for a moment.
    return create_block_mask(sees, None, None, length, length, device=device, _compile=device.type != "cpu")
