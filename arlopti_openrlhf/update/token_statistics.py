"""What an update does to tokens of each probability (Fig. 1-3), from tensors that it has at hand.

Pure functions of torch tensors. By Eq. 15 the gradient of one token's loss at the logits is w · (e_o − P). So the
token's weight and its distribution give the norm, without a backward pass.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.token_update import token_probabilities

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The status entries that hold the rows of `UpdateStatistics.histograms`.
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
    advantages: Tensor  # before AR
    weights: Tensor  # of the whole loss, KL included; not of an entropy bonus, which has no weight for each token
    weights_before_ar: Tensor
    is_clipped: Tensor  # bool: an advantage, but no policy gradient
    is_computed: Tensor  # bool: False in idle responses, whose `log_probs`, ... are of no use
    entropies: Tensor  # nats
    squared_rest: Tensor  # Σ_{j≠o} P_j²


class UpdateStatistics:
    """Sums up the token updates of a rollout batch by probability π_old. The sums of the ranks add up.

    Args:
        device: where the tokens are.

    Attributes:
        lacks_tokens: whether a method has left out tokens whose gradient is unknown.
        sums: (bins, sums) and `histograms`: (2, 50) counts and gradient norms, float64, to be added up over the ranks.
    """

    HISTOGRAM_BINS = 50

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.lacks_tokens = False
        self.edges = torch.tensor(EDGES, device=device)
        self.histogram_edges = torch.arange(self.HISTOGRAM_BINS + 1, device=device) / self.HISTOGRAM_BINS
        # Rows are bins, columns are sums. In float64: in float32 a million tokens' sum would lose the small ones.
        self.sums = torch.zeros(len(EDGES) - 1, len(_SUMS), dtype=torch.float64, device=device)
        self.histograms = torch.zeros(2, self.HISTOGRAM_BINS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: TokenUpdates, is_moved: bool) -> None:
        """Add a micro-batch's tokens. `is_moved` says whether θ has changed since π_old."""
        probabilities = token_probabilities(tokens.old_log_probs)
        norms = logit_gradient_norm(tokens.weights, tokens.log_probs, tokens.squared_rest)
        norms_before = logit_gradient_norm(tokens.weights_before_ar, tokens.log_probs, tokens.squared_rest)
        is_compared = tokens.is_computed & is_moved
        is_positive = is_compared & (tokens.advantages > 0)
        change = token_probabilities(tokens.log_probs) - probabilities
        columns = {
            "count": torch.ones_like(probabilities),
            "abs_advantage": tokens.advantages.abs(),
            "logit_grad_norm": norms * tokens.is_computed,
            "logit_grad_norm_before_ar": norms_before * tokens.is_computed,
            "clipped": tokens.is_clipped,
            "computed": tokens.is_computed,
            "entropy": tokens.entropies * tokens.is_computed,
            "compared": is_compared,
            "probability_change": change * is_compared,
            "positive": is_positive,
            "rose": is_positive & (change > 0),
        }
        values = torch.stack([columns[name].float() for name in _SUMS], dim=1)
        fine_bins = bin_index(probabilities, self.histogram_edges)
        for i, name in enumerate(("count", "logit_grad_norm")):
            self.histograms[i].index_add_(0, fine_bins, values[:, _SUMS.index(name)].double())
        self._put(tokens.old_log_probs, values)

    @torch.no_grad()
    def add_left_out(self, tokens: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Add the tokens that a method leaves out to the norms before it, as those of the policy π_old.

        Args:
            tokens: log π_old, advantages and Σ_{j≠o} P_j², (N,) each, or None where they are not known.
        """
        if tokens is None:
            self.lacks_tokens = True
            return
        old_log_probs, advantages, squared_rest = tokens
        values = torch.zeros(len(advantages), len(_SUMS))
        norms = logit_gradient_norm(advantages, old_log_probs, squared_rest)
        values[:, _SUMS.index("logit_grad_norm_before_ar")] = norms
        device = self.sums.device
        self._put(old_log_probs.to(device), values.to(device))

    def _put(self, old_log_probs: Tensor, values: Tensor) -> None:
        """Add tokens' (N, sums) values to their bins."""
        self.sums.index_add_(0, bin_index(token_probabilities(old_log_probs), self.edges), values.double())

    def metrics(self, before: str | None = None) -> dict[str, float]:
        """Return what each bin holds, as `tokens/<bin>/<name>`. A bin without such tokens has no mean.

        `count` and `share` count token updates. `abs_advantage` is a mean before AR. `logit_grad_norm` is the sum of
        Eq. 15's norms, and `grad_share` the bin's share of it. `grad_share_before_<before>` is the share without the
        weights. Its sums also hold the tokens that methods leave out (`add_left_out`), and it is not to be asked for
        where `lacks_tokens` is true on a rank. `entropy` is a mean in nats, and `clip_ratio` the share of clipped
        tokens. Among the tokens computed after θ has moved, `probability_change` is the mean of π − π_old, and `rose`
        the share of those with a positive advantage whose probability rose (Fig. 3).
        """
        sums = dict(zip(_SUMS, self.sums.T.tolist(), strict=True))
        shares = {
            "share": sums["count"],
            "grad_share": sums["logit_grad_norm"],
        } | ({f"grad_share_before_{before}": sums["logit_grad_norm_before_ar"]} if before else {})
        means = {  # name: sum, over how many
            "abs_advantage": ("abs_advantage", "count"),
            "entropy": ("entropy", "computed"),
            "clip_ratio": ("clipped", "count"),
            "probability_change": ("probability_change", "compared"),
            "rose": ("rose", "positive"),
        }
        metrics: dict[str, float] = {}
        for i, (low, high) in enumerate(pairwise(self.edges.tolist())):
            name = f"tokens/p{low:.2f}-{high:.2f}"
            metrics |= {f"{name}/{key}": sums[key][i] for key in ("count", "logit_grad_norm")}
            metrics |= {f"{name}/{key}": values[i] / sum(values) for key, values in shares.items() if sum(values)}
            metrics |= {f"{name}/{key}": sums[a][i] / sums[n][i] for key, (a, n) in means.items() if sums[n][i]}
        return metrics


_SUMS = (
    "count",
    "abs_advantage",
    "logit_grad_norm",
    "logit_grad_norm_before_ar",
    "clipped",
    "computed",
    "entropy",
    "compared",
    "probability_change",
    "positive",
    "rose",
)
