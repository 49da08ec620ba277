"""What an update does to tokens of each probability (Fig. 1-3), from tensors that it has at hand.

Pure functions of torch tensors. By Eq. 15 the gradient of one token's loss at the logits is w · (e_o − P). So the
token's weight and its distribution give the norm, without a backward pass.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.token_update import token_probabilities

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The metrics with a value for each hundredth of π_old: tokens, and the sum of their norms.
HISTOGRAMS = ("tokens/probability", "tokens/logit_grad_norm_by_probability")


def logit_gradient_norm(weights: Tensor, log_probs: Tensor, squared_rest: Tensor) -> Tensor:
    """Return ‖∂L/∂logits‖ of each token (Eq. 15): |w| · sqrt(1 − 2π + Σ_j P_j²).

    It is computed as |w| · sqrt((1 − π)² + Σ_{j≠o} P_j²), which is the same and does not cancel where π is near 1, as
    it is for most tokens.

    Args:
        weights: (...,) w = ∂L/∂ log π of the token.
        log_probs: (...,) log π of the sampled token, under the policy that is differentiated.
        squared_rest: (...,) Σ_{j≠o} P_j² of its distribution, without the sampled token.

    Returns:
        (...,), in the logits' own unit: logits that are divided by a temperature T have 1/T of it.
    """
    return weights.abs() * (torch.expm1(log_probs).square() + squared_rest).sqrt()


def bin_index(probabilities: Tensor, edges: Sequence[float] | Tensor = EDGES) -> Tensor:
    """Return the index (...,) of each token's bin. Bin i is [edges[i], edges[i + 1]), and the last one is closed.

    An edge belongs to the bin above it, as η belongs to Lopti's high group.
    """
    edges = torch.as_tensor(edges, dtype=probabilities.dtype, device=probabilities.device)
    return torch.bucketize(probabilities, edges[1:-1].contiguous(), right=True)


class TokenUpdates(NamedTuple):
    """Describes the tokens that one micro-batch updates, (N,) each.

    Weights are Eq. 2's w, the derivative of the token's own term of the loss by its log π. Clipped tokens have 0.
    """

    old_log_probs: Tensor  # log π_old
    log_probs: Tensor  # log π as the update finds it
    advantages: Tensor  # before token methods
    weights: Tensor  # of the whole loss, KL included; not of an entropy bonus, which has no weight for each token
    unweighted: Tensor  # the same without token methods
    is_clipped: Tensor  # bool: an advantage, but no policy gradient
    is_computed: Tensor  # bool: False in idle responses, whose `log_probs`, ... are of no use
    entropies: Tensor  # nats
    squared_rest: Tensor  # Σ_{j≠o} P_j²


class UpdateStatistics:
    """Sums up the token updates of a rollout batch by probability π_old. The sums of the ranks add up.

    Args:
        device: where the tokens are.

    Attributes:
        sums: (100, sums) by hundredths of π_old, to be added up over the ranks. In float64, because in float32 a
            million tokens' sum would lose the small ones.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.edges = torch.arange(101, device=device) / 100
        self.sums = torch.zeros(100, len(_SUMS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: TokenUpdates, is_moved: bool) -> None:
        """Add a micro-batch's tokens. `is_moved` says whether θ has changed since π_old."""
        probabilities = token_probabilities(tokens.old_log_probs)
        norms = logit_gradient_norm(tokens.weights, tokens.log_probs, tokens.squared_rest)
        unweighted_norms = logit_gradient_norm(tokens.unweighted, tokens.log_probs, tokens.squared_rest)
        is_compared = tokens.is_computed & is_moved
        is_positive = is_compared & (tokens.advantages > 0)
        change = token_probabilities(tokens.log_probs) - probabilities
        columns = {
            "count": torch.ones_like(probabilities),
            "abs_advantage": tokens.advantages.abs(),
            "logit_grad_norm": norms * tokens.is_computed,
            "unweighted_norm": unweighted_norms * tokens.is_computed,
            "clipped": tokens.is_clipped,
            "computed": tokens.is_computed,
            "entropy": tokens.entropies * tokens.is_computed,
            "compared": is_compared,
            "probability_change": change * is_compared,
            "positive": is_positive,
            "rose": is_positive & (change > 0),
        }
        values = torch.stack([columns[name].float() for name in _SUMS], dim=1)
        self.sums.index_add_(0, bin_index(probabilities, self.edges), values.double())

    def metrics(self, is_whole: bool, is_rescaled: bool) -> dict[str, Any]:
        """Return what each bin holds, as `tokens/<bin>/<name>`, and the histograms. A bin without tokens has no mean.

        `count` and `share` count token updates. `abs_advantage` is a mean before token methods. `logit_grad_norm` is
        the sum of Eq. 15's norms, and `grad_share` the bin's share of it. `entropy` is a mean in nats. `clip_ratio` is
        the share of tokens with an advantage, but without a policy gradient. Among the tokens computed after θ has
        moved, `probability_change` is the mean of π − π_old, and `rose` the share of those with a positive advantage
        whose probability rose (Fig. 3).

        Args:
            is_whole: whether no token is left out. Then `tokens/entropy` is the mean over all bins.
            is_rescaled: whether token methods rescale all tokens. Then `grad_share_unweighted` is the share without
                them.
        """
        names = [f"tokens/p{low:.2f}-{high:.2f}" for low, high in pairwise(EDGES)]
        by_bin = self.sums.view(len(names), -1, len(_SUMS)).sum(dim=1)
        sums = dict(zip(_SUMS, by_bin.T.tolist(), strict=True))
        shares = {"share": "count", "grad_share": "logit_grad_norm"}
        shares |= {"grad_share_unweighted": "unweighted_norm"} if is_rescaled else {}
        means = {  # name: sum, over how many
            "abs_advantage": ("abs_advantage", "count"),
            "entropy": ("entropy", "computed"),
            "clip_ratio": ("clipped", "count"),
            "probability_change": ("probability_change", "compared"),
            "rose": ("rose", "positive"),
        }
        metrics: dict[str, Any] = {}
        for i, name in enumerate(names):
            metrics |= {f"{name}/{key}": sums[key][i] for key in ("count", "logit_grad_norm")}
            metrics |= {f"{name}/{key}": sums[a][i] / sum(sums[a]) for key, a in shares.items() if sum(sums[a])}
            metrics |= {f"{name}/{key}": sums[a][i] / sums[n][i] for key, (a, n) in means.items() if sums[n][i]}
        if is_whole and sum(sums["computed"]):
            metrics["tokens/entropy"] = sum(sums["entropy"]) / sum(sums["computed"])
        of_histograms = [_SUMS.index(name) for name in ("count", "logit_grad_norm")]
        return metrics | dict(zip(HISTOGRAMS, self.sums[:, of_histograms].T.tolist(), strict=True))


_SUMS = (
    "count",
    "abs_advantage",
    "logit_grad_norm",
    "unweighted_norm",
    "clipped",
    "computed",
    "entropy",
    "compared",
    "probability_change",
    "positive",
    "rose",
)
