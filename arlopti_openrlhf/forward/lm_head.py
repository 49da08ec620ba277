"""The LM head on selected positions alone, a block of the vocabulary at a time, so that no (B, T, V) tensor exists.

The head is a large part of a small model's computation and most of an update's memory, because stock OpenRLHF
computes float32 logits of every position, prompt and padding included. What is done with a block of logits is in
plain torch here, and on a GPU in `lm_head_triton`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from arlopti_openrlhf.hardware import multiplies_bf16

# Elements in one block of logits (64 MiB in float32): too few to raise the peak of memory, enough for full speed.
BLOCK_ELEMENTS = 2**24
_FUSED_FACTOR = 4  # Triton's kernels hold 2 bytes of a logit, plain torch up to 12
# What the columns of a block are a multiple of. A GPU's matrix products of an odd width take several times as long.
_WIDTH = 128
_NO_ODDS = -1e4  # its exponential is 0 in float32, as that of −∞ is, but 0 times it is no NaN


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_statistics: bool = False,
    trained: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log π of each target token, the entropy of its distribution and Σ P² of the other tokens, in float32.

    The log-probs are `log_softmax((hidden @ weight.T + bias) / temperature)` at the targets. The backward pass
    computes the logits again, and only those of the tokens that are trained. The host says which, because to find them
    on a GPU it would wait. The hidden states' gradient is added up in float32.

    Of a model that changes its head's logits (Granite, Gemma 2) these are there as a whole, and their gradient, in the
    model's dtype. In float32 there is a block.

    Args:
        hidden: (N, H) last hidden states that predict the targets, or without a weight the (N, V) logits.
        weight: (V, H) of the LM head.
        targets: (N,) token ids o.
        bias: (V,), if the head has one.
        temperature: What logits are divided by; > 0.
        with_entropy: Whether to compute entropies, with their gradient.
        with_statistics: Whether to compute entropies and sums of squares, without a gradient of their own.
        trained: returns, when the backward pass begins, the (n,) indices of the tokens that may have a gradient, or
            None for all.

    Returns:
        (N,) log-probs, (N,) entropies in nats and (N,) Σ_{j≠o} P_j²; None for what was not asked for.
    """
    return _SelectedLogProbs.apply(hidden, weight, bias, targets, temperature, with_entropy, with_statistics, trained)


class _BlockSums(NamedTuple):
    """Holds sums over one block of the vocabulary, (N,) each, where p is the softmax within the block."""

    target: Tensor  # the target's logit, 0 where it lies in another block
    log_total: Tensor  # log Σ exp(logits)
    entropy: Tensor | None  # −Σ p log p
    squares: Tensor | None  # Σ p² without the target


class _SelectedLogProbs(torch.autograd.Function):
    """Computes `selected_log_probs`, and keeps of the logits no more than their (N,) normalisers for the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, with_entropy, with_statistics, trained):
        arithmetic = _arithmetic(hidden.device.type)
        blocks = [
            _BlockSums(*arithmetic.sum_up(logits, targets - block.start, temperature, with_entropy or with_statistics))
            for block, logits in _blocks_of_logits(hidden, None, weight, bias)
        ]
        target_logits = torch.stack([b.target for b in blocks]).sum(dim=0)
        log_totals = torch.stack([b.log_total for b in blocks])
        log_total = log_totals.logsumexp(dim=0)
        log_probs, entropy, squares = target_logits - log_total, None, None
        # Put the blocks together: a block's share s of the mass makes H = Σ s (H_block − log s), and Σ s² Σ p².
        if with_entropy or with_statistics:
            log_shares = log_totals - log_total
            shares = log_shares.exp()
            # A block whose logits are all −∞ has no distribution, and no part in that of the vocabulary.
            is_empty = shares == 0
            entropy = shares * (torch.stack([b.entropy for b in blocks]) - log_shares)
            entropy = entropy.masked_fill(is_empty, 0.0).sum(dim=0)
        if with_statistics:
            squares = shares.square() * torch.stack([b.squares for b in blocks])
            squares = squares.masked_fill(is_empty, 0.0).sum(dim=0)
            ctx.mark_non_differentiable(squares, *(() if with_entropy else (entropy,)))
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy if with_entropy else None)
        ctx.temperature, ctx.trained = temperature, trained
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        rows = ctx.trained()
        if rows is not None:
            targets, log_total, grad_log_probs = targets[rows], log_total[rows], grad_log_probs[rows]
            if entropy is not None:
                entropy, grad_entropy = entropy[rows], grad_entropy[rows]
        grad_log_probs = grad_log_probs / ctx.temperature
        if entropy is not None:
            grad_entropy = grad_entropy / ctx.temperature

        arithmetic = _arithmetic(hidden.device.type)
        grad_hidden = torch.zeros_like(hidden)
        if weight is not None:
            states = (hidden if rows is None else hidden[rows]).to(_product_dtype(hidden))
            grad_states = torch.zeros_like(states, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for block, logits in _blocks_of_logits(hidden, rows, weight, bias):
            grad = arithmetic.differentiate(
                logits, targets - block.start, ctx.temperature, log_total, grad_log_probs, entropy, grad_entropy
            )
            if weight is None:
                _put(grad_hidden[:, block], rows, grad)
                continue
            grad_states += _product_in_float32(grad, weight[block])
            if grad_weight is not None:
                grad_weight[block] = grad.T @ states
            if grad_bias is not None:
                grad_bias[block] = grad.sum(dim=0)
        if weight is not None:
            _put(grad_hidden, rows, grad_states.to(hidden.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _put(destination: Tensor, rows: Tensor | None, values: Tensor) -> None:
    """Copy values into these rows, or into all."""
    if rows is None:
        destination.copy_(values)
    else:
        destination.index_copy_(0, rows, values)


def _blocks_of_logits(
    hidden: Tensor, rows: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each block of the vocabulary with new (N, block) logits of these rows or of all."""
    vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
    elements = BLOCK_ELEMENTS * (_FUSED_FACTOR if _is_fused(hidden.device.type) else 1)
    size = max(1024, elements // max(1, len(hidden if rows is None else rows)))
    size = min(vocabulary, size - size % _WIDTH)
    if weight is not None:
        dtype = _product_dtype(hidden)
        states = (hidden if rows is None else hidden[rows]).to(dtype)
    for start in range(0, vocabulary, size):
        block = slice(start, min(start + size, vocabulary))
        if weight is not None:
            yield block, F.linear(states, weight[block].to(dtype), None if bias is None else bias[block].to(dtype))
        else:
            yield block, hidden[:, block].clone() if rows is None else hidden[:, block].index_select(0, rows)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to multiply in: a CPU without bf16 instructions is several times faster in float32."""
    return torch.float32 if tensor.device.type == "cpu" and not multiplies_bf16() else tensor.dtype


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. A GPU does not round it to the factors' 16 bits; PyTorch's products on a CPU can't do that."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b.to(a.dtype)


@cache
def _is_fused(device: str) -> bool:
    """Return whether Triton's kernels compute on this kind of device."""
    return device == "cuda" and find_spec("triton") is not None


@cache
def _arithmetic(device: str) -> Any:
    """Return what has `sum_up` and `differentiate`: Triton's kernels on a GPU, plain torch elsewhere."""
    if _is_fused(device):
        from arlopti_openrlhf.forward import lm_head_triton

        return lm_head_triton
    return SimpleNamespace(sum_up=_sum_up, differentiate=_differentiate)


def _sum_up(logits: Tensor, columns: Tensor, temperature: float, with_statistics: bool) -> _BlockSums:
    """Sum over a block of logits. Without statistics target and log_total alone, bit for bit.

    Args:
        logits: (N, block), not divided by the temperature. They may be overwritten.
        columns: (N,) of the targets, in the block or not.
    """
    logits = _scaled(logits, temperature)
    inside, column = _locate(columns, logits.shape[1])
    target = torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
    greatest = logits.amax(dim=1).clamp(min=torch.finfo(logits.dtype).min)  # they may all be −∞
    logits.sub_(greatest[:, None])
    odds = logits.exp()
    total = odds.sum(dim=1)
    log_total = total.log() + greatest
    if not with_statistics:
        return _BlockSums(target, log_total, None, None)
    entropy = total.log() - logits.clamp_(min=_NO_ODDS).mul_(odds).sum(dim=1) / total
    # Take the target out before the squares: where π is near 1 the others would be lost in its rounding.
    odds.scatter_(1, column, torch.where(inside[:, None], 0.0, odds.gather(1, column)))
    return _BlockSums(target, log_total, entropy, (torch.linalg.vector_norm(odds, dim=1) / total).square())


def _differentiate(
    logits: Tensor,
    columns: Tensor,
    temperature: float,
    log_total: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient by a block of logits, in their dtype.

    With p the probabilities: d log π_o / d logits = e_o − p, and dH / d logits = −p (log p + H).

    Args:
        logits: (N, block), not divided by the temperature. They may be overwritten.
        columns: (N,) of the targets, in the block or not.
        log_total: (N,) log Σ exp(logits / temperature) over the whole vocabulary.
        grad_log_probs: (N,), divided by the temperature.
        entropy: (N,), where it has a gradient.
        grad_entropy: (N,), divided by the temperature.
    """
    dtype = logits.dtype
    inside, column = _locate(columns, logits.shape[1])
    grad_log_probs = grad_log_probs[:, None]
    log_p = _scaled(logits, temperature).sub_(log_total[:, None])
    if entropy is None or grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs)
    else:
        p = log_p.exp()
        grad = p.mul_(-(grad_log_probs + grad_entropy[:, None] * (log_p.clamp_(min=_NO_ODDS) + entropy[:, None])))
    grad.scatter_add_(1, column, torch.where(inside[:, None], grad_log_probs, 0.0))
    return grad.to(dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return float32 logits divided by the temperature. They may be the same memory."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _locate(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (N,) whether each column lies in the block and (N, 1) the column, any one where it does not."""
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)[:, None]
