"""The weights that token methods give to the tokens of a rollout batch (`token_method.py`)."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import ModelOutput

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.token_method import Method, Tokens, WeightSums, combine, pass_labels
from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.passes import MiniBatch, count_responses
from arlopti_openrlhf.update.ranks import Ranks


class TokenWeights:
    """Holds the weights of one rollout batch's tokens in each pass. Each sample is weighed once, by itself.

    Args:
        methods: the token methods, whose weights multiply.
        by_token: whether the loss is a mean over tokens, and not over responses. In a mean over responses each one is
            divided by its own tokens.
        normalizes: whether the weights are divided by their mean (`_normalize`).

    Attributes:
        distributions: (2, A) entropies in nats and Σ_{j≠o} P_j² of each sample that a forward pass has shown, by the
            sample's id. None where no method asks for entropies.
        mean_weight: what the weights have been divided by; None where they have not.
    """

    def __init__(self, methods: Sequence[Method], by_token: bool, normalizes: bool = False) -> None:
        self.methods, self.by_token, self.normalizes = methods, by_token, normalizes
        self.labels = pass_labels(methods)
        self.mean_weight: float | None = None
        self.distributions: dict[int, Tensor] | None = {} if any(m.needs_entropies for m in methods) else None
        self._divides_by_kept = any(method.divides_by_kept for method in methods)
        self._statistics: list = [None] * len(methods)
        # By the sample's id, (passes, A) each: the weights, and which tokens the loss divides by.
        self._weights: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        self._updated: dict[int, Tensor] = {}  # and the tokens of a weight above 0
        self._left_out: dict[int, Tensor] = {}  # (A,), the tokens that a method leaves out of all its passes
        # For each method (passes, 4): tokens, Σ w, Σ w², tokens of weight 0.
        self._sums: dict[int, list[Tensor]] = {}

    def of_the_next(self) -> "TokenWeights":
        """Return the same for the next rollout batch, of which nothing is known yet."""
        return TokenWeights(self.methods, self.by_token, self.normalizes)

    def look_at_all(self, actor: Actor, items: list[Experience], args: SimpleNamespace, ranks: Ranks) -> None:
        """Compute what the methods have to know of the whole rollout batch. A collective call.

        Entropies are taken from a forward pass that gives log π_old too. Log π_old of all samples is known then.
        """
        if self.distributions is not None:
            old_log_probs.compute(actor, items, args, ranks, self.distributions)
        if any(method.has_statistic for method in self.methods):
            columns = torch.cat([torch.empty(4, 0), *(torch.stack(self._response(item)) for item in items)], dim=1)
            tokens = Tokens(*ranks.gather(columns)[:, None])
            if tokens.mask.numel():
                self._statistics = [method.statistic(tokens) for method in self.methods]
        if self.normalizes:
            self._normalize(items, ranks)

    def _normalize(self, items: list[Experience], ranks: Ranks) -> None:
        """Divide the weights of a rollout batch by their mean over the tokens of all ranks. A collective call.

        The mean is taken as the loss takes its own: over the tokens that it divides by, or over responses. Those of
        several passes add up. So masks whose loss divides by what they keep, and Lopti, have a mean of 1 already.

        Raises:
            ValueError: the mean is 0.
        """
        own = torch.zeros(2, len(self.labels), dtype=torch.float64)
        for item in items:
            weights = self._of_sample(item).double() * self._updated[id(item)]
            counted = self._counted[id(item)].double()
            if self.by_token:
                own += torch.stack([weights.sum(dim=1), counted.sum(dim=1)])
            else:  # such weights are scaled already for a division by all tokens of the response
                tokens = item.action_mask.bool().sum().clamp(min=1)
                own += torch.stack([weights.sum(dim=1) / tokens, counted.amax(dim=1)])
        total, count = ranks.sum_tensor(own).cpu()
        if not count.any():
            return
        # In float32 it does not show in which order the ranks' sums were added.
        mean = (total / count.clamp(min=1)).sum().float().item()
        if not 0 < mean < math.inf:
            names = ", ".join(method.name for method in self.methods)
            raise ValueError(
                f"--algo.token_method_normalize: the mean weight of {names} is {mean:g} in this rollout batch, and "
                "weights cannot be divided by it"
            )
        self.mean_weight = mean
        for item in items:
            self._weights[id(item)] /= mean

    def learn_entropies(self, samples: Sequence[Experience], output: ModelOutput) -> None:
        """Keep the entropies of samples that a first pass has computed, if a method asks for them.

        Args:
            samples: single samples. The idle ones, which the pass did not compute, are known already.
            output: of the forward pass, with the `statistics` that `SelectiveActor` gives.
        """
        if self.distributions is not None:
            values = torch.stack(output.statistics, dim=1)
            self.distributions = old_log_probs.rows_by_sample(samples, values) | self.distributions

    def of(self, samples: Sequence[Experience], index: int, like: Tensor) -> Tensor:
        """Return the factors (B, A) of a micro-batch's advantages in one pass, on the device of `like`."""
        return pad_sequence([self._of_sample(sample)[index] for sample in samples], batch_first=True).to(like.device)

    def updated(self, samples: Sequence[Experience], index: int, like: Tensor) -> Tensor:
        """Return the mask (B, A) of the tokens that one pass updates, as `of`."""
        rows = [self._updated_of(sample)[index] for sample in samples]
        return pad_sequence(rows, batch_first=True).to(like.device)

    def count(self, mini_batch: MiniBatch, index: int, ranks: Ranks) -> float:
        """Return how many tokens one pass updates, of the samples of all ranks. Their π_old must be known."""
        return ranks.sum(float(sum(self._updated_of(sample)[index].sum() for sample in mini_batch.samples)))[0]

    def denominators(self, samples: Sequence[Experience], index: int) -> tuple[int, int]:
        """Return the tokens of the samples that the loss divides by in one pass, and how many samples have any."""
        if not self._divides_by_kept:
            return count_responses(samples)
        for sample in samples:
            self._of_sample(sample)
        lengths = [int(self._counted[id(sample)][index].sum()) for sample in samples]
        return sum(lengths), sum(length > 0 for length in lengths)

    def left_out(self, samples: Sequence[Experience]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log π_old, advantages and Σ_{j≠o} P_j² of the tokens that a method leaves out, (N,) each.

        Methods that divide the tokens into groups leave out none in this sense, even where one group alone is trained.
        None where there are such tokens and their gradient is not known. That is so where no forward pass has shown
        their distributions, which one does for entropies alone, or where the loss is a mean over responses, in which
        tokens have a share that depends on the response.
        """
        found = [torch.empty(3, 0)]
        for sample in samples:
            self._of_sample(sample)
            is_left_out = self._left_out[id(sample)][0]
            if not is_left_out.any():
                continue
            if self.distributions is None or not self.by_token:
                return None
            rows = sample.action_log_probs, sample.advantages, self.distributions[id(sample)][1]
            found.append(torch.stack([row.cpu().float()[is_left_out] for row in rows]))
        log_probs, advantages, squared_rest = torch.cat(found, dim=1)
        return log_probs, advantages, squared_rest

    def metrics(self, samples: Sequence[Experience], ranks: Ranks) -> dict[str, float]:
        """Return what each method logs of its own weights (`Method.metrics`), before `_normalize`.

        What that divides by is `token_method/mean_weight`.

        Args:
            samples: this rank's, which were trained on.
            ranks: the data-parallel ranks.
        """
        found: dict[str, float] = {}
        if self.mean_weight is not None:
            found["token_method/mean_weight"] = self.mean_weight
        for k, method in enumerate(self.methods):
            own = sum((self._sums[id(sample)][k] for sample in samples), torch.zeros(len(method.passes), 4).double())
            sums = [WeightSums(*row) for row in ranks.sum_tensor(own).tolist()]
            if sums[0].tokens:
                found |= method.metrics(dict(zip(method.passes, sums, strict=True)), self._statistics[k])
        return found

    def _of_sample(self, sample: Experience) -> Tensor:
        """Return the factors (passes, A) of a sample's advantages, 0 outside its response.

        They are the weights, but for 1 in the other groups: a loss over the sequence has the advantages of all groups.
        """
        if id(sample) not in self._weights:
            self._weigh(sample)
        return self._weights[id(sample)]

    def _updated_of(self, sample: Experience) -> Tensor:
        self._of_sample(sample)
        return self._updated[id(sample)]

    def _weigh(self, sample: Experience) -> None:
        tokens = Tokens(*(values[None] for values in self._response(sample)))
        if tokens.mask.numel():
            of_methods = [m.weigh(tokens, s) for m, s in zip(self.methods, self._statistics, strict=True)]
        else:
            of_methods = [[torch.zeros_like(tokens.log_probs)] * len(method.passes) for method in self.methods]
        self._sums[id(sample)] = [torch.stack([_sums(w.double()) for w in passes]) for passes in of_methods]
        weights, counted, updated, left_out = _by_pass(self.methods, of_methods, torch.ones_like(tokens.log_probs))
        if not self.by_token:
            # The loss divides the response by all of its tokens.
            weights = weights * (counted.shape[1] / counted.sum(dim=1, keepdim=True).clamp(min=1))
        of_sample = (
            (self._weights, weights),
            (self._counted, counted),
            (self._updated, updated),
            (self._left_out, left_out),
        )
        for rows, values in of_sample:
            rows[id(sample)] = torch.zeros(len(values), len(sample.action_mask), dtype=values.dtype)
            rows[id(sample)][:, sample.action_mask.bool().cpu()] = values

    def _response(self, sample: Experience) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log π_old, advantages, ones and entropies of a sample's response, (tokens,) each, float32 on the CPU.

        Entropies that no method asks for are zeros.
        """
        is_response = sample.action_mask.bool().cpu()
        log_probs, advantages = (v.cpu().float()[is_response] for v in (sample.action_log_probs, sample.advantages))
        ones = torch.ones_like(log_probs)
        if self.distributions is None:
            return log_probs, advantages, ones, torch.zeros_like(ones)
        return log_probs, advantages, ones, self.distributions[id(sample)][0].float()[is_response]


def _by_pass(
    methods: Sequence[Method], of_methods: Sequence[Sequence[Tensor]], ones: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the weights that each method gives in each of its passes, (1, tokens) each.

    Args:
        methods: the token methods.
        of_methods: their weights.
        ones: the weights without a method.

    Returns:
        (passes, tokens) each: the factors of the advantages, the tokens that the loss divides by, and the tokens that
        the pass updates. (1, tokens) the tokens that a method leaves out of all its passes.
    """
    factors, counted, updated, left_out = [[ones]], [[ones.bool()]], [[ones.bool()]], torch.zeros_like(ones).bool()
    for method, passes in zip(methods, of_methods, strict=True):
        factors.append([torch.where(w == 0, ones, w) if method.groups else w for w in passes])
        counted.append([w != 0 if method.divides_by_kept else ones.bool() for w in passes])
        updated.append([w != 0 for w in passes])
        if not method.groups:
            left_out |= (torch.cat(list(passes)) == 0).all(dim=0)
    return torch.cat(combine(factors)), torch.cat(combine(counted)), torch.cat(combine(updated)), left_out


def _sums(weights: Tensor) -> Tensor:
    """Return the number of weights, Σ w, Σ w², and how many are 0, (4,) float64."""
    sums = [weights.numel(), weights.sum(), weights.square().sum(), (weights == 0).sum()]
    return torch.tensor(sums, dtype=torch.float64)


def reads_entropies(methods: Sequence[Method], actor: Actor) -> bool:
    """Return whether a method reads entropies.

    Raises:
        ValueError: the policy cannot give them without a forward pass more.
    """
    names = [method.name for method in methods if method.needs_entropies]
    if names and (actor.is_vlm or not isinstance(actor, SelectiveActor)):
        raise ValueError(
            f"token methods that read entropies ({', '.join(names)}) need the selective update of a text model"
        )
    return bool(names)
