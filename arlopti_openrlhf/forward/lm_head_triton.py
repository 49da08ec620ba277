"""What `lm_head` does with a block of logits, in Triton: each is read once forward, read and written once backward.

In plain torch a logit moves some 50 bytes in each direction, because every step is a kernel of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # logits that one program holds at a time


def sum_up(logits: Tensor, columns: Tensor, temperature: float, with_statistics: bool) -> tuple[Tensor | None, ...]:
    """Return the `lm_head._BlockSums` of a block of logits. A program takes a row.

    Args:
        logits: (N, block), not divided by the temperature. They stay as they are.
        columns: (N,) of the targets, in the block or not.
    """
    rows, width = logits.shape
    target, log_total, entropy, squares = torch.empty(4, rows, dtype=torch.float32, device=logits.device).unbind()
    if rows:
        logits = logits.contiguous()
        sums = target, log_total, entropy, squares
        _sum_up[(rows,)](logits, columns, *sums, width, temperature, with_statistics, _TILE, num_warps=8)
    return target, log_total, *((entropy, squares) if with_statistics else (None, None))


def differentiate(
    logits: Tensor,
    columns: Tensor,
    temperature: float,
    log_total: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Overwrite a block of logits by their gradient, and return it. `lm_head` says what the arguments are."""
    rows, width = logits.shape
    if rows:
        with_entropy = entropy is not None and grad_entropy is not None
        given = (entropy, grad_entropy) if with_entropy else (log_total, log_total)  # these are not read
        _differentiate[(rows, triton.cdiv(width, _TILE))](
            logits, columns, log_total, grad_log_probs, *given, width, temperature, with_entropy, _TILE, num_warps=8
        )
    return logits


@triton.jit
def _sum_up(
    logits,
    columns,
    targets,
    log_totals,
    entropies,
    all_squares,
    width,
    temperature,
    WITH_STATISTICS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + row)
    # Sums are relative to the greatest logit so far, and shrink when a greater one is met.
    greatest, target, total, weighted, squares = -1e30, 0.0, 0.0, 0.0, 0.0
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < width
        x = tl.load(logits + row * width + place, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        is_target = inside & (place == column)
        target += tl.sum(tl.where(is_target, x, 0.0))
        new = tl.maximum(greatest, tl.max(x))
        shrink = tl.exp(greatest - new)
        odds = tl.exp(x - new)
        if WITH_STATISTICS:
            weighted = shrink * (weighted + (greatest - new) * total)
            weighted += tl.sum(tl.where(odds > 0, (x - new) * odds, 0.0))
            others = tl.where(is_target, 0.0, odds)
            squares = shrink * shrink * squares + tl.sum(others * others)
        total = shrink * total + tl.sum(odds)
        greatest = new
    tl.store(targets + row, target)
    tl.store(log_totals + row, tl.log(total) + greatest)
    if WITH_STATISTICS:
        tl.store(entropies + row, tl.log(total) - weighted / total)
        tl.store(all_squares + row, squares / (total * total))


@triton.jit
def _differentiate(
    logits,
    columns,
    log_totals,
    grad_log_probs,
    entropies,
    grad_entropies,
    width,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < width
    pointers = logits + row * width + place
    grad = tl.load(grad_log_probs + row)
    log_p = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(log_totals + row)
    factor = grad
    if WITH_ENTROPY:
        factor += tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    p = tl.exp(log_p)
    result = tl.where(place == tl.load(columns + row), grad, 0.0) - tl.where(p > 0, p * factor, 0.0)
    tl.store(pointers, result.to(logits.dtype.element_ty), mask=inside)
