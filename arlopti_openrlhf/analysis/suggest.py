"""Suggest α and η by two stated rules, from how the gradient is distributed over probabilities.

A token's share is the norm of its own gradient at the logits, by Eq. 15, so no backward pass is needed.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.analysis.policy import Tokens
from arlopti_openrlhf.analysis.rollouts import Batch
from arlopti_openrlhf.token_update import token_probabilities
from arlopti_openrlhf.update.token_statistics import logit_gradient_norm

PAPER_ETA = 0.5
# With π spread evenly below 0.5, the paper's α = 0.3 lowers the weight of the low group to 1 - 0.3 · 0.75 = 0.775, but
# hardly that of tokens near 1. So the high group gains a factor 1/0.775 = 1.29 on the low one.
GAIN = 1.29
# The values for which shares are listed.
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
ETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BINS = 200
_RESAMPLES = 500


def suggest(batch: Batch, tokens: Tokens, seed: int = 0) -> dict:
    """Suggest α and η, each with a 95% interval by resampling prompts, and list the shares that they come from.

    Half of the gradient, Σ |A| · ‖e_o − P‖ over tokens, lies below η, so that Lopti's two steps carry equal weight.
    At α, the gradient of the tokens with π ≥ 0.5 gains a factor `GAIN` on that of the others, as with the paper's 0.3
    where low probabilities are spread evenly. α is at most 1, and None where one of the two has no gradient.
    """
    mask = batch.action_mask
    probabilities = token_probabilities(tokens.log_probs)
    norm = logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)
    # Sum over fine bins of probability, prompt by prompt, so that a resample of prompts is one matrix product.
    cell = (probabilities * _BINS).long().clamp(max=_BINS - 1) + _BINS * batch.prompts[:, None]
    size = _BINS * (int(batch.prompts.max()) + 1)

    def by_prompt(values: Tensor) -> Tensor:  # (prompts, _BINS)
        return torch.zeros(size, dtype=torch.float64).index_add_(0, cell[mask], values[mask].double()).view(-1, _BINS)

    # Sums of the norm and of π times the norm give AR's at any α: (1 - α) · G + α · Gπ.
    plain, weighted = by_prompt(norm), by_prompt(norm * probabilities)
    # The rules on every resample give the intervals, and on all prompts the values.
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(plain), (_RESAMPLES, len(plain)), generator=generator)
    times = torch.nn.functional.one_hot(draws, len(plain)).sum(dim=1).double()  # (resamples, prompts)
    resampled = list(zip(times @ plain, times @ weighted, strict=True))
    alphas = [_alpha(*sums) for sums in resampled]
    etas = [_eta(sums) for sums, _ in resampled]
    plain, weighted = plain.sum(0), weighted.sum(0)
    low = slice(0, int(PAPER_ETA * _BINS))
    return {
        "alpha": {"value": _alpha(plain, weighted), **_interval(alphas)},
        "eta": {"value": _eta(plain), **_interval(etas)},
        "low_tokens": (probabilities[mask] < PAPER_ETA).double().mean().item(),
        "low_gradient": (plain[low].sum() / plain.sum()).item(),
        "low_gradient_by_alpha": {
            f"{a:g}": (((1 - a) * plain + a * weighted)[low].sum() / ((1 - a) * plain + a * weighted).sum()).item()
            for a in ALPHAS
        },
        "low_gradient_by_eta": {f"{e:g}": (plain[: round(e * _BINS)].sum() / plain.sum()).item() for e in ETAS},
    }


def _alpha(plain: Tensor, weighted: Tensor) -> float | None:
    half = int(PAPER_ETA * _BINS)
    low, high = (plain[:half].sum(), weighted[:half].sum()), (plain[half:].sum(), weighted[half:].sum())
    if not low[0] or not high[0]:
        return None
    # [(1 - α) + α · π_high] / [(1 - α) + α · π_low] = GAIN, with each group's mean π, weighted by the norm.
    pi_high, pi_low = (high[1] / high[0]).item(), (low[1] / low[0]).item()
    slope = (pi_high - 1) - GAIN * (pi_low - 1)
    return min(1.0, (GAIN - 1) / slope) if slope > 0 else 1.0


def _eta(plain: Tensor) -> float | None:
    total = plain.cumsum(0)
    if not total[-1]:  # a resample of prompts without advantages
        return None
    return (int((total < total[-1] / 2).sum()) + 1) / _BINS


def _interval(values: list[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"low": None, "high": None}
    return {"low": known[int(0.025 * len(known))], "high": known[int(0.975 * len(known))]}
