"""The weights of a rollout batch do not depend on how it is divided among ranks or micro-batches."""

import math
from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf import methods, token_method
from arlopti_openrlhf.update.passes import MiniBatch
from arlopti_openrlhf.update.token_weights import TokenWeights

ARGUMENTS = {
    "stapo": ["stapo.tau=0.5"],
    "stare": ["stare.entropy=9", "stare.negative=0.9"],
    "clip_cov": ["clip_cov.share=0.05", "clip_cov.low=0.2"],
    "surprisal_band": ["surprisal_band.lo=0.5", "surprisal_band.hi=2"],
}


# Entropies and Σ P² of a sample of four response tokens, of which 80/20 keeps two at the threshold 2.
TWO_OF_FOUR = torch.tensor([[9.0, 9.0, 0.1, 2.0, 0.1, 2.0], [9.0, 9.0, 0.5, 0.6, 0.7, 0.8]])
ALONE = SimpleNamespace(sum_tensor=lambda tensor: tensor)  # the ranks, where there is one


def samples(count: int) -> list[Experience]:
    """Single samples as the replay buffer holds them, with prompts of 3 tokens and responses of none to 11."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        mask = torch.tensor([0] * 2 + [1] * (i % 12))
        p, a = torch.rand(2, len(mask), generator=generator)
        made.append(Experience(action_mask=mask, action_log_probs=p.log(), advantages=4 * a - 2))
    return made


def entropies(items: list[Experience]) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {id(item): torch.rand(2, len(item.action_mask), generator=generator) * 2 for item in items}


def of_rank(name: str, items: list[Experience], everything: list[Experience], known: dict) -> TokenWeights:
    """The weights as a rank sees them that has `items`, while all ranks together have `everything`."""

    def all_columns(columns):
        others = [item for item in everything if all(item is not own for own in items)]
        return torch.cat([columns, *(torch.stack(weights._response(item)) for item in others)], dim=1)

    loaded = token_method.load([name], ARGUMENTS.get(name, []))
    weights = TokenWeights(loaded, by_token=True)
    weights.look_at_all(None, items, None, SimpleNamespace(gather=all_columns))
    weights.distributions = known
    return weights


@pytest.fixture(autouse=True)
def known_entropies(monkeypatch):
    """Entropies are given, and not computed by a model."""
    from arlopti_openrlhf.update import old_log_probs

    def compute(actor, items, args, ranks, distributions):
        distributions |= known

    known: dict = {}
    monkeypatch.setattr(old_log_probs, "compute", compute)
    return known


def product(weights: TokenWeights, items: list[Experience], index: int) -> torch.Tensor:
    """The weights of one pass, 0 for the tokens that it does not update."""
    return weights.of(items, index, torch.empty(0)) * weights.updated(items, index, torch.empty(0))


@pytest.mark.parametrize("name", methods.built_in())
def test_neither_ranks_nor_micro_batches_change_a_weight(name, known_entropies):
    items = samples(36)
    known_entropies |= entropies(items)
    one, halves = of_rank(name, items, items, known_entropies), (items[::2], items[1::2])
    two = [of_rank(name, half, items, known_entropies) for half in halves]
    for index in range(len(one.labels)):
        whole = product(one, items, index)
        assert whole.shape == (36, 13) and 0 < whole.count_nonzero()
        for rank, half, start in zip(two, halves, (0, 1), strict=True):
            by_two = torch.cat(
                [
                    torch.nn.functional.pad(w := product(rank, half[i : i + 2], index), (0, 13 - w.shape[1]))
                    for i in range(0, 18, 2)
                ]
            )
            assert torch.equal(by_two, whole[start::2])


def test_denominators():
    """Two kept tokens in one of two responses; with AR, which divides by all, nothing changes."""
    items = samples(36)[3:5]
    items[0].action_log_probs[2:], items[1].action_log_probs[2:] = -1.0, -1.0
    for names, expected in ((["ar"], (7, 2)), (["eighty_twenty"], (2, 1)), (["ar", "eighty_twenty"], (2, 1))):
        weights = TokenWeights(token_method.load(names, []), by_token=True)
        weights.distributions = {id(items[0]): torch.zeros(2, 5), id(items[1]): TWO_OF_FOUR}
        weights._statistics = [2.0 if name == "eighty_twenty" else None for name in names]
        assert weights.denominators(items, 0) == expected
        assert weights.count(MiniBatch([items]), 0, SimpleNamespace(sum=lambda n: [2 * n])) == 2 * expected[0]


def test_a_mean_over_responses_divides_each_by_its_kept_tokens():
    """Two of four tokens are kept: weights of 2, since the loss divides by four."""
    (item,) = samples(36)[4:5]
    weights = TokenWeights(token_method.load(["eighty_twenty"], []), by_token=False)
    weights.distributions = {id(item): TWO_OF_FOUR}
    weights._statistics = [2.0]
    assert weights.of([item], 0, torch.empty(0)).tolist() == [[0, 0, 0, 2, 0, 2]]


def normalized(names: list[str], items: list[Experience], arguments=(), by_token=True, others=None) -> TokenWeights:
    """The normalized weights of a rank's `items`, where another rank has those in `others`."""

    def loaded(normalizes: bool) -> TokenWeights:
        made = TokenWeights(token_method.load(names, arguments), by_token, normalizes)
        if made.distributions is not None:
            made.distributions = {id(item): TWO_OF_FOUR for item in items}
        made._statistics = [2.0 if name in ("eighty_twenty", "stapo") else None for name in names]
        return made

    theirs: list[torch.Tensor] = []
    if others is not None:
        loaded(True)._normalize(others, SimpleNamespace(sum_tensor=lambda own: theirs.append(own) or own))
    weights = loaded(True)
    weights._normalize(items, SimpleNamespace(sum_tensor=lambda own: sum(theirs, own)))
    return weights


def test_the_mean_weight_is_one():
    """AR with α = 0.5 and probabilities 0.5 and 0.1: weights 0.75 and 0.55. Three tokens of the first, one of the
    other, so the mean is (3 · 0.75 + 0.55) / 4 = 0.7, and not that of the responses' means.
    """
    items = samples(36)[1:4:2]
    items[0].action_log_probs[2:], items[1].action_log_probs[2:] = math.log(0.1), math.log(0.5)
    weights = normalized(["ar"], items, ["ar.alpha=0.5"])
    assert weights.mean_weight == pytest.approx(0.7)
    found = weights.of(items, 0, torch.empty(0))
    assert found[:, 2:].flatten().tolist() == pytest.approx([0.55 / 0.7, 0, 0] + [0.75 / 0.7] * 3)
    # What is logged of a method is its own. Over responses, the mean is (0.75 + 0.55) / 2.
    figures = weights.metrics(items, ALONE)
    assert figures["token_method/mean_weight"] == weights.mean_weight == pytest.approx(0.7)
    assert figures["ar/mean_weight"] == pytest.approx(0.7)
    assert normalized(["ar"], items, ["ar.alpha=0.5"], by_token=False).mean_weight == pytest.approx(0.65)


def test_the_mean_weight_is_that_of_all_ranks():
    items = samples(36)
    whole = normalized(["ar", "positive_weight"], items)
    for own, others in ((items[::2], items[1::2]), (items[:1], items[1:])):
        part = normalized(["ar", "positive_weight"], own, others=others)
        assert part.mean_weight == whole.mean_weight != 1
        like = torch.empty(0)
        for item in own:
            assert torch.equal(part.of([item], 0, like), whole.of([item], 0, like))
    alone = normalized(["ar", "positive_weight"], items[::2])
    assert alone.mean_weight != whole.mean_weight


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
    weights = normalized(names, items, arguments, by_token)
    raw = TokenWeights(weights.methods, by_token)
    raw.distributions, raw._statistics = weights.distributions, weights._statistics
    assert weights.mean_weight == 1
    for i in range(len(weights.labels)):
        assert torch.equal(*(product(w, items, i) for w in (weights, raw)))
        assert weights.denominators(items, i) == raw.denominators(items, i)


def test_a_mean_weight_of_zero_is_refused():
    items = samples(36)[4:5]
    with pytest.raises(ValueError, match="--algo.token_method_normalize: the mean weight of surprisal_band is 0 in"):
        normalized(["surprisal_band"], items, ["surprisal_band.lo=1e6", "surprisal_band.hi=1e7"])


def test_no_response_has_a_token():
    items = samples(1)
    weights = TokenWeights(token_method.load(["clip_cov"], []), by_token=True)
    weights.look_at_all(None, items, None, SimpleNamespace(gather=lambda columns: columns))
    assert weights.of(items, 0, torch.empty(0)).tolist() == [[0, 0]]
    assert weights.metrics(items, ALONE) == {}
    normalized = TokenWeights(token_method.load(["ar"], []), by_token=True, normalizes=True)
    normalized.look_at_all(None, items, None, ALONE)
    assert normalized.metrics(items, ALONE) == {}


def test_the_tokens_that_are_left_out():
    """Two of the four, with what the statistics need; not known in a mean over responses, or without entropies.

    No token is left out of both of Lopti's passes.
    """
    (item,) = samples(36)[4:5]
    weights = TokenWeights(token_method.load(["eighty_twenty"], []), by_token=True)
    weights.distributions, weights._statistics = {id(item): TWO_OF_FOUR}, [2.0]
    log_probs, advantages, squared_rest = weights.left_out([item])
    assert torch.equal(log_probs, item.action_log_probs[[2, 4]])
    assert torch.equal(advantages, item.advantages[[2, 4]]) and squared_rest.tolist() == pytest.approx([0.5, 0.7])
    weights.by_token = False
    assert weights.left_out([item]) is None
    weights.by_token, weights.distributions = True, None
    assert weights.left_out([item]) is None
    for arguments in ([], ["lopti.groups=low"]):  # one group alone leaves out the other, and no method does
        weights = TokenWeights(token_method.load(["lopti"], arguments), by_token=True)
        assert not weights.left_out([item])[0].numel()


def test_a_group_keeps_the_factors_of_the_others_advantages():
    """A loss over the sequence has the advantages of both groups. AR with α = 0.5: 0.55 and 0.75."""
    (item,) = samples(36)[2:3]
    item.action_log_probs[2:] = torch.tensor([0.1, 0.5]).log()
    weights = TokenWeights(token_method.load(["lopti", "ar"], ["ar.alpha=0.5"]), by_token=True)
    for index, updated in enumerate(([0, 0, 1, 0], [0, 0, 0, 1])):
        assert weights.of([item], index, torch.empty(0))[0].tolist() == pytest.approx([0, 0, 0.55, 0.75])
        assert weights.updated([item], index, torch.empty(0))[0].tolist() == updated


def test_without_a_method_every_response_token_has_the_weight_one():
    items = samples(5)
    weights = TokenWeights([], by_token=True)
    assert weights.labels == [""] and weights.metrics(items, ALONE) == {}
    assert torch.equal(weights.of(items[3:], 0, torch.empty(0))[1], items[4].action_mask.float())
    assert weights.count(MiniBatch([items]), 0, SimpleNamespace(sum=lambda n: [n])) == 10
