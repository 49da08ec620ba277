"""Measure in which tokens the gradients of different prompts agree. Where they do there is signal, elsewhere noise.

The tokens are divided into cells, by probability or entropy, and by the sign of the advantage. A cell agrees as far as
its gradient on one half A of the prompts points where the whole policy gradient points on the other half B. Sampling
noise of one prompt says nothing about another, so noise has no agreement, however large it is.

Every number is a sum of inner products between prompts. With g_p the gradient of prompt p and g_cp the part of cell c,
over all ways to halve P prompts and n = P / 2,

    E ⟨g_c^A, g^B⟩ = n² / (P (P − 1)) · Σ_{p≠q} ⟨g_cp, g_q⟩
    E ‖g_c^A‖²     = n / P · Σ_p ‖g_cp‖² + n (n − 1) / (P (P − 1)) · Σ_{p≠q} ⟨g_cp, g_cq⟩

So no halves have to be drawn, and a bootstrap over prompts is a matrix product. The gradients are those of the loss by
all parameters, without AdamW's scaling of each parameter.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.lab.analysis import method_effects
from arlopti_openrlhf.lab.analysis.figures import DIRECTION_EDGES, bin_names
from arlopti_openrlhf.lab.analysis.policy import Policy, Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.token_update import token_probabilities
from arlopti_openrlhf.update.token_statistics import bin_index

# Edges of entropy in nats, from certain tokens to open ones. 80/20 reports 0.67 as the edge of its upper fifth.
ENTROPY_EDGES = (0.0, 0.1, 0.3, 0.7, 1.5, float("inf"))
LEAST_PROMPTS = 8  # with different rewards. With fewer, a resample is often of a few prompts alone
# Numbers that a gradient is folded into. It is a prime, so that no column of a matrix falls on itself. A model of at
# most as many parameters keeps its gradients exactly, as the quickstart's does.
SKETCH = 2**20 - 3
_RESAMPLES = 2000
AGREES = "agrees"


class Cell(NamedTuple):
    """A cell of tokens."""

    name: str
    tokens: Tensor  # (B, A) bool


class Products(NamedTuple):
    """Inner products between the gradients of P prompts, for C sets of tokens. The last set is all tokens."""

    with_whole: Tensor  # (C, P, P) ⟨g_cp, g_q⟩
    own: Tensor  # (C, P, P) ⟨g_cp, g_cq⟩


def make_cells(batch: Batch, tokens: Tokens, by: str) -> list[Cell]:
    """Divide the tokens that have an advantage, by the sign of the advantage and by `by`.

    `by` is "probability" (the bins of Fig. 3) or "entropy" (`ENTROPY_EDGES`, in nats).
    """
    if by == "entropy":
        symbol, values, edges = "H", tokens.entropy, ENTROPY_EDGES
    else:
        symbol, values, edges = "π", token_probabilities(tokens.log_probs), DIRECTION_EDGES
    index = bin_index(values, edges)
    signs = {"A > 0": batch.advantages > 0, "A < 0": batch.advantages < 0}
    return [
        Cell(f"{sign}, {symbol} {name}", batch.action_mask & of_sign & (index == i))
        for sign, of_sign in signs.items()
        for i, name in enumerate(bin_names(edges))
    ]


def informative_prompts(batch: Batch) -> Tensor:
    """Return the numbers (P,) of the prompts whose responses have an advantage. The others have no gradient."""
    return batch.prompts[batch.advantages.any(dim=1)].unique()


def inner_products(policy: Policy, batch: Batch, old_log_probs: Tensor, cells: Sequence[Cell]) -> Products:
    """Compute the inner products of the prompts' gradients, cell by cell, and then those of all tokens.

    Each prompt takes one backward pass for each cell, over its own responses. So a cell costs one pass over the batch.
    2 · P gradients of at most `SKETCH` float32 numbers are kept on the CPU at a time. The policy has the weights that
    the batch was sampled from, and `old_log_probs` (B, A) are its log π.
    """
    prompts = informative_prompts(batch)
    size = min(SKETCH, sum(p.numel() for p in policy.parameters))

    def gradients(selected: Tensor) -> Tensor:  # (P, size)
        rows = torch.zeros(len(prompts), size)
        for row, prompt in zip(rows, prompts, strict=True):
            of_prompt = selected & (batch.prompts == prompt)[:, None]
            if of_prompt.any():
                row.copy_(sketch(policy.gradient(batch, old_log_probs, batch.advantages, of_prompt), size))
        return rows

    whole = gradients(batch.action_mask)
    with_whole, own = [], []
    for cell in cells:
        part = gradients(cell.tokens)
        with_whole.append((part @ whole.T).double())
        own.append((part @ part.T).double())
    of_whole = (whole @ whole.T).double()
    return Products(torch.stack([*with_whole, of_whole]), torch.stack([*own, of_whole]))


def sketch(gradient: Sequence[Tensor], size: int) -> Tensor:
    """Fold a gradient into `size` numbers with random signs, (size,), so that inner products stay as they are.

    Those of gradients with at most `size` numbers stay exactly, because each number keeps a place of its own. Others
    stay on average. The error of a cosine is then about 1 / √size, so 0.001 with `SKETCH`. The signs are the same in
    each call. The gradient has one tensor per parameter, on one device.
    """
    device = gradient[0].device
    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(size, device=device)
    start = 0
    for tensor in gradient:
        # In pieces, so the signs and places take little memory next to the gradient.
        for piece in tensor.flatten().split(size):
            signs = torch.randint(2, piece.shape, generator=generator, device=device, dtype=torch.int8) * 2 - 1
            # The places follow each other, and begin again behind the last.
            signed, place = piece * signs, start % size
            total[place : place + len(piece)] += signed[: size - place]
            total[: max(0, place + len(piece) - size)] += signed[size - place :]
            start += len(piece)
    return total.cpu()


def measure(products: Products, seed: int = 0) -> list[dict[str, float] | None]:
    """Return the share and the agreement of each set of tokens, the last of which is all tokens.

    `seed` is that of the bootstrap over prompts.

    Returns:
        For each set, or None where it or the whole has no gradient:
        `norm`, ‖g_c‖ / ‖g‖. `share`, ⟨g_c, g⟩ / ‖g‖², which adds up to 1 over cells.
        `cosine`, E ⟨g_c^A, g^B⟩ / √(E ‖g_c^A‖² · E ‖g^B‖²). It says how pure the cell's gradient is, large or small.
        `contribution`, E ⟨g_c^A, g^B⟩ / E ‖g^A‖². It is, to first order, what a step along the cell's gradient gains
        on prompts that it has not seen, in a unit that all cells share. So it adds up to the whole's cosine.
        `low`, `high`, `contribution_low`, `contribution_high`, 95% intervals. They resample prompts in the inner
        product and leave the norms as they are. A prompt never meets its own copy.
    """
    number = products.own.shape[-1]
    half, pairs = number / 2, number * (number - 1)
    diagonal = torch.diagonal(products.own, dim1=1, dim2=2)  # (C, P)
    apart = products.own.sum(dim=(1, 2)) - diagonal.sum(dim=1)
    squares = half / number * diagonal.sum(dim=1) + half * (half - 1) / pairs * apart  # (C,) E ‖g_c^A‖²
    # One draw serves all cells. `times` says how often each prompt is in a resample. The first is the batch itself.
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(number, (_RESAMPLES, number), generator=generator)
    times = torch.nn.functional.one_hot(draws, number).sum(dim=1).double()
    times = torch.cat([torch.ones(1, number, dtype=torch.float64), times])  # (resamples, P)
    # A resample of one prompt alone has no pair, and so no agreement.
    drawn_pairs = (number**2 - times.square().sum(dim=1)).clamp(min=1)
    results: list[dict[str, float] | None] = []
    for matrix, own, square in zip(products.with_whole, products.own, squares, strict=True):
        if not (square > 0 and squares[-1] > 0):
            results.append(None)
            continue
        sums = ((times @ matrix) * times).sum(dim=1) - times.square() @ matrix.diagonal()
        inner = half**2 * sums / drawn_pairs  # (resamples,) E ⟨g_c^A, g^B⟩
        low, high = (torch.quantile(inner[1:], q).item() for q in (0.025, 0.975))
        of_cosine, of_contribution = (square * squares[-1]).sqrt().item(), squares[-1].item()
        results.append(
            {
                "norm": (own.sum() / products.own[-1].sum()).clamp(min=0).sqrt().item(),
                "share": (matrix.sum() / products.own[-1].sum()).item(),
                "cosine": inner[0].item() / of_cosine,
                "low": low / of_cosine,
                "high": high / of_cosine,
                "contribution": inner[0].item() / of_contribution,
                "contribution_low": low / of_contribution,
                "contribution_high": high / of_contribution,
            }
        )
    return results


def analyze(policy: Policy, batch: Batch, tokens: Tokens, by: str, seed: int) -> dict | None:
    """Return the agreement of every cell, and which token methods lower what, as the picture and the report show it.

    None where fewer than `LEAST_PROMPTS` prompts have responses of different reward. The policy has the weights that
    the batch was sampled from, `by` is that of `make_cells`, and `seed` the bootstrap's.
    """
    number = len(informative_prompts(batch))
    if number < LEAST_PROMPTS:
        return None
    cells = make_cells(batch, tokens, by)
    *found, whole = measure(inner_products(policy, batch, tokens.log_probs, cells), seed)
    masks = [cell.tokens for cell in cells]
    sizes = method_effects.gradient_sizes(batch, tokens)
    before = method_effects.gradient_shares(sizes, masks) or [0.0] * len(cells)
    data: dict[str, Any] = {
        "by": by,
        "prompts": number,
        "whole": whole,
        "cells": [
            {"name": cell.name, "tokens": int(cell.tokens.sum()), "logit_share": share, "found": standing(one)}
            | (one or {})
            for cell, share, one in zip(cells, before, found, strict=True)
        ],
        "methods": {},
        "left_out": {},
    }
    # Where nothing agrees, all of it would be noise, and any method would lower some.
    agrees = [standing(one) == AGREES for one in found]
    if standing(whole) == AGREES and any(agrees):
        weights, data["left_out"] = method_effects.method_weights(batch, tokens)
        for name, w in weights.items():
            after = method_effects.gradient_shares(w * sizes, masks)
            means = [w[mask].mean().item() if mask.any() else None for mask in masks]
            data["methods"][name] = {"weights": means} | method_effects.effect(before, after, agrees)
    return data


def standing(found: dict[str, float] | None) -> str:
    """Say whether a cell agrees with the whole on other prompts, by its 95% interval."""
    if found is None:
        return "no gradient"
    return AGREES if found["low"] > 0 else "opposes" if found["high"] < 0 else "no agreement"
