"""Attention over a packed row: each segment sees itself, causally, and the whole of its prefix (`shared_prompt`).

There is one way for each kind of device:
- CPU: no mask exists. The kernel gives the normaliser of each query's softmax along with its result. So what a query
  takes from the prefix and what it takes from its own segment are computed apart and put together, and all responses
  to a prompt see its tokens in one call.
- A GPU: PyTorch's own flash attention takes all segments in one call, each as a sequence whose causal mask is aligned
  to its last key. It knows grouped heads, so keys and values are not expanded.
- A GPU in float32, which that kernel does not compute: segment by segment, with the same mask.

flash-attn and FlexAttention also take the whole row in one call (`packed_attention`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

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
    if _has_kernel(query) and value.shape == key.shape:
        return _flash_attention(query, key, value, packed, scale, dropout)
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


def _has_kernel(query: Tensor) -> bool:
    """Return whether PyTorch's flash attention computes such queries."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = query.shape[-1]
    return width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, scale: float, dropout: float
) -> Tensor:
    """Return `segment_attention` by one call for all segments.

    It is the operator below `torch.nn.attention.varlen`, which has no arguments that both PyTorch 2.11 and 2.13 take
    for grouped heads.
    """
    # The projections have made (L, heads, D). Gradients in that order need no copy on their way back.
    keys, values = (x.squeeze(0).transpose(0, 1).index_select(0, packed.keys) for x in (key, value))
    output, *_ = torch.ops.aten._flash_attention_forward(
        query.squeeze(0).transpose(0, 1),
        keys,
        values,
        packed.query_starts,
        packed.key_starts,
        *packed.longest,
        dropout,
        True,  # causal, aligned to the last key
        False,
        scale=scale,
    )
    return output[None]


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
