"""The LM head on selected positions alone, a block of the vocabulary at a time: no (B, T, V) tensor ever exists.

Pure torch. An LM head is a large part of a small model, and most of an update's memory: stock OpenRLHF computes
float32 logits of every position, prompt and padding included.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arlopti_openrlhf.cpu import multiplies_bf16

# Elements of one block of float32 logits: small enough to add nothing to the peak, large enough for full speed.
BLOCK_ELEMENTS = 2**24


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log π of each target token, and the entropy of its distribution, in float32.

    Equals `log_softmax(hidden @ weight.T + bias) / temperature` at the targets. The backward pass computes the logits
    again, and only for positions with a gradient: a clipped token, or one outside the group, costs nothing there.

    Args:
        hidden: (N, H) last hidden states that predict the targets.
        weight: (V, H) of the LM head.
        targets: (N,) token ids.
        bias: (V,), if the head has one.
        temperature: what logits are divided by; > 0.
        with_entropy: whether to compute the entropies too, in nats.

    Returns:
        (N,) log-probs and (N,) entropies (None without `with_entropy`).
    """
    log_probs, entropy = _SelectedLogProbs.apply(hidden, weight, bias, targets, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, with_entropy):
        target_logits = hidden.new_zeros(len(targets), dtype=torch.float32)
        log_totals, mean_logits = [], []
        for block, logits in _blocks_of_logits(hidden, weight, bias, temperature):
            inside, column = _locate(targets, block)
            target_logits = torch.where(inside, logits.gather(1, column)[:, 0], target_logits)
            log_totals.append(logits.logsumexp(dim=1))
            if with_entropy:
                probabilities = (logits - log_totals[-1][:, None]).exp_()
                mean_logits.append(probabilities.mul_(logits).sum(dim=1))
        log_total = torch.stack(log_totals).logsumexp(dim=0)
        log_probs, entropy = target_logits - log_total, None
        if with_entropy:
            block_shares = (torch.stack(log_totals) - log_total).exp_()
            entropy = log_total - (block_shares * torch.stack(mean_logits)).sum(dim=0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy)
        ctx.temperature = temperature
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
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
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """bf16 products are emulated on a CPU without bf16 instructions, several times slower than float32."""
    return torch.float32 if tensor.device.type == "cpu" and not multiplies_bf16() else tensor.dtype


def _blocks_of_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """(block of the vocabulary, its (N, block) float32 logits, divided by the temperature)."""
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
    """(N,) whether a target lies in the block, and (N, 1) its column there (any, where it does not)."""
    column = targets - block.start
    inside = (column >= 0) & (column < block.stop - block.start)
    return inside, column.clamp(0, block.stop - block.start - 1)[:, None]
