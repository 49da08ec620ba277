"""The weights that token methods give to the tokens of a rollout batch (`token_method.py`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.token_method import Method, Tokens, WeightSums, combine, pass_labels
from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample, Weights


class Known(NamedTuple):
    """What the methods know of a whole rollout batch."""

    statistics: Sequence[Any]  # of each method (`Method.statistic`), or None
    mean_weight: float | None = None  # by which weights are divided; None if they are not
    has_tokens: bool = False  # whether the statistics are of any token


class TokenWeights:
    """Weighs the tokens of a rollout batch for each pass. Each sample is weighed by itself.

    Args:
        methods: the token methods. Their weights multiply; without a method they are 1.
        by_token: whether the loss is a mean over tokens, and not over responses. In a mean over responses each one is
            divided by its own tokens.
        normalizes: whether the weights are divided by their mean (`_mean`).

    Attributes:
        labels: the names of the passes in metrics.
    """

    def __init__(self, methods: Sequence[Method], by_token: bool, normalizes: bool = False) -> None:
        self.methods, self.by_token, self.normalizes = methods, by_token, normalizes
        self.labels = pass_labels(methods)
        self.needs_entropies = any(method.needs_entropies for method in methods)
        self.needs_rollout_batch = normalizes or any(method.needs_rollout_batch for method in methods)
        self.knows_nothing = Known([None] * len(methods))

    def learn(self, samples: Sequence[Sample], ranks: Ranks) -> Known:
        """Return what the methods have to know of a rollout batch before they weigh its tokens. A collective call.

        Log π_old must be known, and the entropies if a method asks for them.
        """
        known = self.knows_nothing
        if any(method.find for method in self.methods):
            columns = torch.cat([torch.empty(len(Tokens._fields), 0), *map(_response, samples)], dim=1)
            columns = ranks.gather(columns)
            # What is not finite is no method's fault. The loss shows it, and the step is refused.
            tokens = Tokens(*columns[:, columns[:2].isfinite().all(dim=0)][:, None])  # log-probs and advantages
            if tokens.mask.numel():
                known = Known([method.statistic(tokens) for method in self.methods], has_tokens=True)
        if self.normalizes:
            known = known._replace(mean_weight=self._mean(samples, known, ranks))
        return known

    def of(self, sample: Sample, known: Known) -> Weights:
        """Return a sample's weights, which follow from its log π_old and from what `learn` returned.

        Raises:
            ValueError: a method reads the rollout's log-probs, and the sample has none.
        """
        tokens = Tokens(*_response(sample)[:, None])  # (1, tokens) each
        readers = [method.name for method in self.methods if method.needs_rollout_log_probs]
        if readers and not tokens.rollout_log_probs.isfinite().all():
            names = ", ".join(readers)
            raise ValueError(f"token methods that read the rollout's log-probs ({names}): a sample has none")
        ones = torch.ones_like(tokens.log_probs)
        of_methods = []
        for method, statistic in zip(self.methods, known.statistics, strict=True):
            # Without a finite token in the rollout batch there is no statistic, and the steps are refused.
            is_weighed = tokens.mask.numel() and (known.has_tokens or not method.find)
            of_methods.append(method.weigh(tokens, statistic) if is_weighed else [ones] * len(method.passes))
        every = [weights.double() for passes in of_methods for weights in passes]
        sums = [[w.numel(), w.sum(), w.square().sum(), (w == 0).sum()] for w in every]

        # A pass multiplies advantages by the methods' weights, updates the tokens whose weights are all above 0, and
        # divides by all tokens or by those that a method keeps. The advantages of other groups stay as they are.
        factors, updated, counted = [[ones]], [[ones.bool()]], [[ones.bool()]]
        for method, passes in zip(self.methods, of_methods, strict=True):
            factors.append([torch.where(w == 0, ones, w) if method.groups else w for w in passes])
            updated.append([w != 0 for w in passes])
            counted.append([w != 0 if method.divides_by_kept else ones.bool() for w in passes])
        scale, is_updated, is_counted = (torch.cat(combine(rows)) for rows in (factors, updated, counted))
        if not self.by_token:
            # The loss divides the response by all of its tokens.
            scale = scale * (is_counted.shape[1] / is_counted.sum(dim=1, keepdim=True).clamp(min=1))
        if known.mean_weight is not None:
            scale = scale / known.mean_weight

        def in_place(values: Tensor) -> Tensor:
            rows = torch.zeros(len(values), len(sample.action_mask), dtype=values.dtype)
            rows[:, sample.action_mask.bool().cpu()] = values
            return rows

        return Weights(
            factors=in_place(scale),
            updated=in_place(is_updated),
            counted=in_place(is_counted),
            sums=torch.tensor(sums, dtype=torch.float64).view(-1, 4),
        )

    def coverage(self, samples: Sequence[Sample], ranks: Ranks) -> tuple[bool, bool]:
        """Return whether no response token is left out of all passes, and whether all are rescaled besides.

        What a token that is left out has, nobody computes. Groups alone change no gradient. A collective call.
        """
        pairs = [(s.weights.updated.any(dim=0), s.action_mask.bool().cpu()) for s in samples if s.weights is not None]
        is_whole = bool(ranks.min(all(updated[mask].all() for updated, mask in pairs)))
        return is_whole, is_whole and any(not method.groups for method in self.methods)

    def metrics(self, weights: Sequence[Weights], known: Known, ranks: Ranks) -> dict[str, float]:
        """Return what each method logs of its own weights (`Method.metrics`), before they are normalized.

        The mean that they are divided by is `token_method/mean_weight`. The weights are those of this rank's samples
        that were trained on.
        """
        logged = {} if known.mean_weight is None else {"token_method/mean_weight": known.mean_weight}
        none = torch.zeros(sum(len(method.passes) for method in self.methods), 4).double()
        sums = iter(ranks.sum_tensor(sum((own.sums for own in weights), none)).tolist())
        for method, statistic in zip(self.methods, known.statistics, strict=True):
            of_passes = {name: WeightSums(*next(sums)) for name in method.passes}
            if of_passes[method.passes[0]].tokens:
                logged |= method.metrics(of_passes, statistic)
        return logged

    def _mean(self, samples: Sequence[Sample], known: Known, ranks: Ranks) -> float | None:
        """Return the mean weight over the tokens of all ranks, or None if no weight is above 0. A collective call.

        The mean is taken as the loss takes its own: over the tokens that it divides by, or over responses. Those of
        several passes add up. So masks whose loss divides by what they keep, and Lopti, have a mean of 1 already.
        """
        own = torch.zeros(2, len(self.labels), dtype=torch.float64)
        for sample in samples:
            weights = self.of(sample, known)
            factors, counted = weights.factors.double() * weights.updated, weights.counted.double()
            factors = factors.nan_to_num(0.0, 0.0)  # of a log-prob that is not finite
            if self.by_token:
                own += torch.stack([factors.sum(dim=1), counted.sum(dim=1)])
            else:  # such factors are scaled already for a division by all tokens of the response
                tokens = sample.action_mask.bool().sum().clamp(min=1)
                own += torch.stack([factors.sum(dim=1) / tokens, counted.amax(dim=1)])
        total, count = ranks.sum_tensor(own).cpu()
        # In float32 it does not show in which order the ranks' sums were added.
        return (total / count.clamp(min=1)).sum().float().item() or None


def _response(sample: Sample) -> Tensor:
    """Return the fields of `Tokens` for a sample's response, (5, tokens) float32 on the CPU.

    Entropies that no forward pass has shown, and log-probs that vLLM has not given, are NaN.
    """
    log_probs, unknown = sample.action_log_probs, old_log_probs.unknown(sample.action_mask)
    entropies = unknown if sample.entropies is None else sample.entropies
    rollout = unknown if sample.rollout_log_probs is None else sample.rollout_log_probs
    rows = log_probs, sample.advantages, torch.ones_like(log_probs), entropies, rollout
    return torch.stack([row.cpu().float() for row in rows])[:, sample.action_mask.bool().cpu()]
