"""The LM head on selected positions alone, a block of the vocabulary at a time, so that no (B, T, V) tensor exists.

Pure torch. The head is a large part of a small model's computation and most of an update's memory, because stock
OpenRLHF computes float32 logits of every position, prompt and padding included.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.hardware import multiplies_bf16

# Elements in one block of float32 logits (64 MiB): too few to raise the peak of memory, enough for full speed.
BLOCK_ELEMENTS = 2**24


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_statistics: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log π of each target token, the entropy of its distribution and Σ P² of the other tokens, in float32.

    The log-probs are `log_softmax((hidden @ weight.T + bias) / temperature)` at the targets. The backward pass
    computes the logits again, and only for positions with a gradient. A token that is clipped or outside the group
    costs nothing there.

    Args:
        hidden: (N, H) last hidden states that predict the targets.
        weight: (V, H) of the LM head.
        targets: (N,) token ids o.
        bias: (V,), if the head has one.
        temperature: What logits are divided by; > 0.
        with_entropy: Whether to compute entropies, with their gradient.
        with_statistics: Whether to compute entropies and sums of squares, without a gradient of their own.

    Returns:
        (N,) log-probs, (N,) entropies in nats and (N,) Σ_{j≠o} P_j²; None for what was not asked for.
    """
    return _SelectedLogProbs.apply(hidden, weight, bias, targets, temperature, with_entropy, with_statistics)


@torch.no_grad()
def distribution_statistics(logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Describe the distributions that predict the targets.

    Args:
        logits: (..., V), divided by the temperature.
        rows: (N,) index of each distribution among the flattened positions.
        targets: (N,) token ids o.

    Returns:
        (N,) entropies in nats and (N,) Σ_{j≠o} P_j², float32.
    """
    logits = logits.flatten(0, -2)
    entropies, squares = [logits.new_empty(0, dtype=torch.float32)], [logits.new_empty(0, dtype=torch.float32)]
    size = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for block_rows, block_targets in zip(rows.split(size), targets.split(size), strict=True):
        inside = torch.ones_like(block_targets, dtype=torch.bool)
        sums = _BlockSums.of(logits[block_rows].float(), inside, block_targets[:, None], with_statistics=True)
        entropies.append(sums.entropy)
        squares.append(sums.squares)
    return torch.cat(entropies), torch.cat(squares)


def statistics_of_logits(
    logits: Tensor, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, packed: bool
) -> tuple[Tensor, Tensor]:
    """Return `distribution_statistics` of the selected tokens, from the logits of upstream's actor.

    Args:
        logits: (B, T, V), divided by the temperature; with `packed` (1, L, V), without the padding's.
        sequences: (B, T) token ids.
        action_mask: (B, A), A < T, nonzero on the selected tokens; column j stands for token T - A + j.
        attention_mask: (B, T), 1 on tokens.
        packed: Whether the actor packs its samples.

    Returns:
        (B, A) entropies in nats and (B, A) Σ_{j≠o} P_j², float32, 0 where nothing is selected.
    """
    length, width = sequences.shape[1], action_mask.shape[1]
    row, column = action_mask.bool().nonzero(as_tuple=True)
    before = row * length + length - width + column - 1  # the position that predicts the token
    targets = sequences.flatten()[before + 1]
    if packed:  # count the tokens up to each position: the logits have no padding
        before = (attention_mask.flatten().long().cumsum(0) - 1)[before]
    entropies, squares = (
        values.new_zeros(action_mask.shape).index_put_((row, column), values)
        for values in distribution_statistics(logits, before, targets)
    )
    return entropies, squares


class _BlockSums(NamedTuple):
    """Holds sums over one block of the vocabulary, (N,) each, where p is the softmax within the block."""

    log_total: Tensor  # log Σ exp(logits)
    entropy: Tensor | None  # −Σ p log p
    squares: Tensor | None  # Σ p² without the target

    @classmethod
    def of(cls, logits: Tensor, inside: Tensor, column: Tensor, with_statistics: bool) -> "_BlockSums":
        """Sum over (N, block) logits, which are overwritten. Without statistics log_total alone, bit for bit."""
        greatest = logits.amax(dim=1)
        logits.sub_(greatest[:, None])
        odds = logits.exp()
        total = odds.sum(dim=1)
        log_total = total.log() + greatest
        if not with_statistics:
            return cls(log_total, None, None)
        entropy = total.log() - logits.mul_(odds).sum(dim=1) / total
        # Take the target out before the squares: where π is near 1 the others would be lost in its rounding.
        odds.scatter_(1, column, torch.where(inside[:, None], 0.0, odds.gather(1, column)))
        return cls(log_total, entropy, (torch.linalg.vector_norm(odds, dim=1) / total).square())


class _SelectedLogProbs(torch.autograd.Function):
    """Computes `selected_log_probs`, and keeps of the logits no more than their (N,) normalisers for the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, with_entropy, with_statistics):
        target_logits = hidden.new_zeros(len(targets), dtype=torch.float32)
        blocks = []
        for block, logits in _blocks_of_logits(hidden, weight, bias, temperature):
            inside, column = _locate(targets, block)
            target_logits = torch.where(inside, logits.gather(1, column)[:, 0], target_logits)
            blocks.append(_BlockSums.of(logits, inside, column, with_entropy or with_statistics))
        log_totals = torch.stack([b.log_total for b in blocks])
        log_total = log_totals.logsumexp(dim=0)
        log_probs, entropy, squares = target_logits - log_total, None, None
        # Put the blocks together: a block's share s of the mass makes H = Σ s (H_block − log s), and Σ s² Σ p².
        if with_entropy or with_statistics:
            log_shares = log_totals - log_total
            shares = log_shares.exp()
            entropy = (shares * (torch.stack([b.entropy for b in blocks]) - log_shares)).sum(dim=0)
        if with_statistics:
            squares = (shares.square() * torch.stack([b.squares for b in blocks])).sum(dim=0)
            ctx.mark_non_differentiable(squares, *(() if with_entropy else (entropy,)))
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy if with_entropy else None)
        ctx.temperature = temperature
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        # Most tokens may have no gradient: compute the logits of the others alone.
        rows = grad_log_probs != 0
        if entropy is not None:
            rows |= grad_entropy != 0
        rows = rows.nonzero()[:, 0]
        states, targets, log_total = hidden[rows], targets[rows], log_total[rows, None]
        grad_log_probs = (grad_log_probs[rows] / ctx.temperature)[:, None]
        if entropy is not None:
            entropy, grad_entropy = entropy[rows, None], (grad_entropy[rows] / ctx.temperature)[:, None]

        dtype = _product_dtype(hidden)
        states_of_product = states.to(dtype)
        grad_states = torch.zeros_like(states, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for block, logits in _blocks_of_logits(states, weight, bias, ctx.temperature):
            # With p the probabilities: d log π_o / d logits = e_o − p, and dH / d logits = −p (log p + H).
            inside, column = _locate(targets, block)
            if entropy is None:
                grad = logits.sub_(log_total).exp_().mul_(-grad_log_probs)
            else:
                log_p = logits.sub_(log_total)
                grad = log_p.exp().mul_(-(grad_log_probs + grad_entropy * (log_p + entropy)))
            grad.scatter_add_(1, column, torch.where(inside[:, None], grad_log_probs, 0.0))
            grad = grad.to(dtype)
            grad_states += grad @ weight[block].to(dtype)
            if grad_weight is not None:
                grad_weight[block] = grad.T @ states_of_product
            if grad_bias is not None:
                grad_bias[block] = grad.sum(dim=0)
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_states.to(hidden.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to multiply in: a CPU without bf16 instructions is several times faster in float32."""
    return torch.float32 if tensor.device.type == "cpu" and not multiplies_bf16() else tensor.dtype


def _blocks_of_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each block of the vocabulary with its (N, block) float32 logits, divided by the temperature."""
    dtype = _product_dtype(hidden)
    hidden = hidden.to(dtype)
    vocabulary = weight.shape[0]
    size = min(vocabulary, max(1024, BLOCK_ELEMENTS // max(1, len(hidden))))
    for start in range(0, vocabulary, size):
        block = slice(start, min(start + size, vocabulary))
        logits = hidden @ weight[block].to(dtype).T
        if bias is not None:
            logits = logits + bias[block].to(dtype)
        yield block, logits.float().div_(temperature)


def _locate(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return (N,) whether each target lies in the block and (N, 1) its column there, any column where it does not."""
    column = targets - block.start
    inside = (column >= 0) & (column < block.stop - block.start)
    return inside, column.clamp(0, block.stop - block.start - 1)[:, None]
