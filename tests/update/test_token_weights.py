"""The weights of a rollout batch do not depend on how it is divided among ranks or micro-batches."""

import math
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from arlopti_openrlhf import methods, token_method
from arlopti_openrlhf.update import token_weights
from arlopti_openrlhf.update.sample import PassWeights, Sample
from arlopti_openrlhf.update.token_weights import Known, TokenWeights

ARGUMENTS = {
    "stapo": ["stapo.tau=0.5"],
    "stare": ["stare.entropy=9", "stare.negative=0.9"],
    "clip_cov": ["clip_cov.share=0.05", "clip_cov.low=0.2"],
    "surprisal_band": ["surprisal_band.lo=0.5", "surprisal_band.hi=2"],
}


# Entropies of a sample of four response tokens, of which 80/20 keeps two at the threshold 2.
TWO_OF_FOUR = torch.tensor([9.0, 9.0, 0.1, 2.0, 0.1, 2.0])
ALONE = SimpleNamespace(sum_tensor=lambda own: own, gather=lambda own: own)  # the ranks, where there is one


def samples(count: int) -> list[Sample]:
    """Single samples as the replay buffer holds them, with prompts of 3 tokens and responses of none to 11."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        mask = torch.tensor([0] * 2 + [1] * (i % 12))
        p, a = torch.rand(2, len(mask), generator=generator)
        mu = torch.rand(len(mask), generator=generator)
        made.append(
            Sample(action_mask=mask, action_log_probs=p.log(), advantages=4 * a - 2, rollout_log_probs=mu.log())
        )
    return made


def with_entropies(items: list[Sample], values: torch.Tensor | None = None) -> list[Sample]:
    """The samples with what a forward pass has shown: the same entropies (A,) for all, or random ones."""
    generator = torch.Generator().manual_seed(1)
    for item in items:
        random = 2 * torch.rand(len(item.action_mask), generator=generator)
        item.entropies = random if values is None else values
    return items


def of_rank(name: str, items: list[Sample], everything: list[Sample], normalizes: bool = False) -> TokenWeights:
    """Weigh the samples of a rank that has `items`, while all ranks together have `everything`."""

    def all_columns(columns):
        others = [item for item in everything if all(item is not own for own in items)]
        return torch.cat([columns, *(token_weights._response(item) for item in others)], dim=1)

    weights = TokenWeights(token_method.load([name], ARGUMENTS.get(name, [])), True, normalizes)
    weigh(weights, items, SimpleNamespace(gather=all_columns, sum_tensor=lambda own: own))
    return weights


def weigh(weights: TokenWeights, items: list[Sample], ranks) -> Known:
    """Give samples their weights, as the trainer does."""
    known = weights.learn(items, ranks)
    for item in items:
        item.weights = weights.of(item, known)
    return known


def product(items: list[Sample], index: int) -> torch.Tensor:
    """The weights of one pass, 0 for the tokens that it does not update."""
    weights = PassWeights.of([item.weights for item in items], index)
    assert torch.equal(weights.places, weights.updated.flatten().nonzero()[:, 0])
    return weights.factors * weights.updated


@pytest.mark.parametrize("name", methods.built_in())
def test_neither_ranks_nor_micro_batches_change_a_weight(name):
    items = with_entropies(samples(36))
    passes = len(of_rank(name, items, items).labels)
    whole = [product(items, index) for index in range(passes)]
    assert all(of_pass.shape == (36, 13) and of_pass.count_nonzero() for of_pass in whole)
    for start in (0, 1):
        half = items[start::2]
        of_rank(name, half, items)
        for index, of_pass in enumerate(whole):
            by_two = [product(half[i : i + 2], index) for i in range(0, 18, 2)]
            padded = [torch.nn.functional.pad(rows, (0, 13 - rows.shape[1])) for rows in by_two]
            assert torch.equal(torch.cat(padded), of_pass[start::2])


@pytest.mark.parametrize("name", methods.built_in())
def test_a_log_prob_that_is_not_finite_breaks_its_own_weight_at_most(name):
    """The loss shows it, and the step is refused. No method is blamed, and no mean is lost."""
    items = with_entropies(samples(36))
    items[11].action_log_probs[5] = torch.nan
    passes = range(len(of_rank(name, items, items).labels))
    broken = [torch.cat([item.weights.factors[index] for item in items]).isnan() for index in passes]
    assert all(of_pass.sum() <= 1 for of_pass in broken)
    of_rank(name, items, items, normalizes=True)  # which finds a mean
    for item in items:
        item.advantages = item.advantages * torch.nan  # as one reward makes all that are normalized over the batch
    of_rank(name, items, items)


@pytest.mark.parametrize("missing", [None, torch.tensor([0.0, 0.0, -1.0, torch.nan, -1.0])])
def test_a_sample_without_the_rollouts_log_probs_is_refused_where_they_are_read(missing):
    """As an agent of one's own may return it. Outside the response anything goes."""
    (item,) = samples(4)[3:]
    weights = TokenWeights(token_method.load(["dppo", "ar"], []), by_token=True)
    item.rollout_log_probs = torch.tensor([torch.nan, torch.nan, -1.0, -1.0, -1.0])
    weights.of(item, weights.knows_nothing)
    item.rollout_log_probs = missing
    with pytest.raises(ValueError, match=r"read the rollout's log-probs \(dppo\): a sample has none"):
        weights.of(item, weights.knows_nothing)
    other = TokenWeights(token_method.load(["ar"], []), by_token=True)
    other.of(item, other.knows_nothing)


def test_the_tokens_that_the_loss_divides_by():
    """Two kept tokens in one of two responses; with AR, which divides by all, nothing changes."""
    items = samples(36)[3:5]
    items[0].action_log_probs[2:], items[1].action_log_probs[2:] = -1.0, -1.0
    items[0].entropies, items[1].entropies = torch.zeros(5), TWO_OF_FOUR
    for names, expected in ((["ar"], [3, 4]), (["eighty_twenty"], [0, 2]), (["ar", "eighty_twenty"], [0, 2])):
        weights = TokenWeights(token_method.load(names, []), by_token=True)
        known = Known([2.0 if name == "eighty_twenty" else None for name in names], has_tokens=True)
        found = [weights.of(item, known) for item in items]
        assert [int(own.counted.sum()) for own in found] == [int(own.updated.sum()) for own in found] == expected


def test_a_mean_over_responses_divides_each_by_its_kept_tokens():
    """Two of four tokens are kept: weights of 2, since the loss divides by four."""
    items = samples(36)[4:5]
    raw(["eighty_twenty"], items, by_token=False)
    assert product(items, 0).tolist() == [[0, 0, 0, 2, 0, 2]]


def raw(names: list[str], items: list[Sample], arguments=(), by_token=True) -> TokenWeights:
    """Weigh samples anew, without normalizing."""
    made = TokenWeights(token_method.load(names, arguments), by_token)
    known = Known([2.0 if name in ("eighty_twenty", "stapo") else None for name in names], has_tokens=True)
    for item in with_entropies(items, TWO_OF_FOUR) if made.needs_entropies else items:
        item.weights = made.of(item, known)
    return made


def mean_weight(names: list[str], items: list[Sample], arguments=(), by_token=True, others=()) -> float | None:
    """Normalize the weights of a rank's `items`, where another rank has those in `others`. Return their mean."""
    made = TokenWeights(token_method.load(names, arguments), by_token, normalizes=True)
    if made.needs_entropies:
        with_entropies(items, TWO_OF_FOUR)
    theirs: list[torch.Tensor] = []
    if others:
        made.learn(others, SimpleNamespace(sum_tensor=lambda own: theirs.append(own) or own))
    ranks = SimpleNamespace(sum_tensor=lambda own: sum(theirs, own), gather=ALONE.gather)
    return weigh(made, items, ranks).mean_weight


def test_the_mean_weight_is_one():
    """AR with α = 0.5 and probabilities 0.5 and 0.1: weights 0.75 and 0.55. Three tokens of the first, one of the
    other, so the mean is (3 · 0.75 + 0.55) / 4 = 0.7, and not that of the responses' means.
    """
    items = samples(36)[1:4:2]
    items[0].action_log_probs[2:], items[1].action_log_probs[2:] = math.log(0.1), math.log(0.5)
    mean = mean_weight(["ar"], items, ["ar.alpha=0.5"])
    assert mean == pytest.approx(0.7)
    found = product(items, 0)
    assert found[:, 2:].flatten().tolist() == pytest.approx([0.55 / 0.7, 0, 0] + [0.75 / 0.7] * 3)
    # What is logged of a method is its own. Over responses, the mean is (0.75 + 0.55) / 2.
    figures = raw(["ar"], items, ["ar.alpha=0.5"]).metrics([i.weights for i in items], Known([None], mean), ALONE)
    assert figures["token_method/mean_weight"] == mean
    assert figures["ar/mean_weight"] == pytest.approx(0.7)
    assert mean_weight(["ar"], items, ["ar.alpha=0.5"], by_token=False) == pytest.approx(0.65)


def test_the_mean_weight_is_that_of_all_ranks():
    items = samples(36)
    mean = mean_weight(["ar", "positive_weight"], items)
    whole = [product([item], 0) for item in items]
    assert mean != 1
    for mine in (slice(0, 36, 2), slice(0, 1)):
        own = items[mine]
        others = [item for item in items if all(item is not other for other in own)]
        assert mean_weight(["ar", "positive_weight"], own, others=others) == mean
        for item, weights in zip(own, whole[mine], strict=True):
            assert torch.equal(product([item], 0), weights)
    assert mean_weight(["ar", "positive_weight"], items[::2]) != mean


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (["lopti"], []),
        (["eighty_twenty"], []),
        (["stapo"], ["stapo.tau=0.9", "stapo.kappa=1"]),
        (["lopti", "eighty_twenty"], []),
        (["ar"], ["ar.alpha=0"]),
    ],
)
def test_a_mean_weight_of_one_changes_no_bit(names, arguments, by_token):
    """Lopti's masks add up to one. The losses of 80/20 and STAPO divide by the tokens that they keep."""
    items = [s for s in samples(36) if len(s.action_mask) == 6]
    before = raw(names, items, arguments, by_token)
    of_passes = range(len(before.labels))
    counted = torch.stack([item.weights.counted for item in items])
    weights = [product(items, i) for i in of_passes]
    assert mean_weight(names, items, arguments, by_token) == 1
    assert all(torch.equal(product(items, i), weights[i]) for i in of_passes)
    assert torch.equal(torch.stack([item.weights.counted for item in items]), counted)


def test_weights_that_are_all_zero_have_nothing_to_be_divided_by():
    """No token is updated then, as without normalizing."""
    items = samples(36)[4:5]
    assert mean_weight(["surprisal_band"], items, ["surprisal_band.lo=1e6", "surprisal_band.hi=1e7"]) is None
    assert not product(items, 0).any() and items[0].weights.factors.isfinite().all()


def test_no_response_has_a_token():
    items = samples(1)
    weights = TokenWeights(token_method.load(["clip_cov"], []), by_token=True)
    known = weigh(weights, items, ALONE)
    assert product(items, 0).tolist() == [[0, 0]]
    assert weights.metrics([items[0].weights], known, ALONE) == {}
    normalized = TokenWeights(token_method.load(["ar"], []), by_token=True, normalizes=True)
    assert normalized.metrics([items[0].weights], weigh(normalized, items, ALONE), ALONE) == {}


def test_a_statistic_may_be_none(tmp_path):
    """The method is asked all the same. Without a token in the batch it is not."""
    (tmp_path / "gate.py").write_text(
        "def statistic(tokens): return None\n"
        "def weigh(tokens, statistic):\n    assert tokens.mask.numel()\n    return tokens.mask / 4\n"
    )
    weights = TokenWeights(token_method.load([str(tmp_path / "gate.py")], []), by_token=True)
    for items, expected in ((samples(36)[2:3], [0, 0, 0.25, 0.25]), (samples(1), [0, 0])):
        weigh(weights, items, ALONE)
        assert product(items, 0).tolist() == [expected]


def test_a_group_keeps_the_factors_of_the_others_advantages():
    """A loss over the sequence has the advantages of both groups. AR with α = 0.5: 0.55 and 0.75."""
    items = samples(36)[2:3]
    items[0].action_log_probs[2:] = torch.tensor([0.1, 0.5]).log()
    raw(["lopti", "ar"], items, ["ar.alpha=0.5"])
    for index, expected in enumerate(([0, 0, 1, 0], [0, 0, 0, 1])):
        weights = PassWeights.of([item.weights for item in items], index)
        assert weights.factors[0].tolist() == pytest.approx([0, 0, 0.55, 0.75])
        assert weights.updated[0].tolist() == expected


def test_without_a_method_every_response_token_has_the_weight_one():
    items = samples(5)
    weights = raw([], items)
    assert weights.labels == [""] and weights.metrics([i.weights for i in items], weights.knows_nothing, ALONE) == {}
    assert torch.equal(product(items[3:], 0)[1], items[4].action_mask.float())


def test_weights_are_a_value_which_nothing_changes():
    items = samples(36)[2:4]
    raw(["ar"], items)
    with pytest.raises(FrozenInstanceError):
        items[0].weights.factors = None
