"""Cells' gradients add up to the whole, and agree between prompts where there is signal and nowhere else."""

import dataclasses
import itertools
import json

import pytest
import torch
from arlopti_testing.analysis_fakes import flat

from arlopti_openrlhf.lab.analysis import gradient_agreement
from arlopti_openrlhf.lab.analysis.gradient_agreement import Products


@pytest.fixture(scope="module")
def cells(batch, tokens):
    return gradient_agreement.make_cells(batch, tokens, "probability")


@pytest.fixture(scope="module")
def products(policy, batch, tokens, cells):
    return gradient_agreement.inner_products(policy, batch, tokens.log_probs, cells)


def products_of(parts: torch.Tensor) -> Products:
    """Return the products of prompts' gradients, (C, P, D)."""
    whole = parts.sum(dim=0)
    sets = torch.cat([parts, whole[None]])
    return Products(sets @ whole.T, sets @ sets.transpose(1, 2))


@pytest.mark.parametrize("by", ["probability", "entropy"])
def test_cells_divide_the_tokens_that_have_an_advantage(batch, tokens, by):
    cells = gradient_agreement.make_cells(batch, tokens, by)
    assert torch.equal(sum(cell.tokens.long() for cell in cells), (batch.advantages != 0).long())
    assert len(cells) == 10 and len({cell.name for cell in cells}) == 10
    values = tokens.log_probs.exp() if by == "probability" else tokens.entropy
    (second,) = [c for c in cells if c.name in ("A < 0, π 0.25-0.5", "A < 0, H 0.1-0.3")]
    low, high = (0.25, 0.5) if by == "probability" else (0.1, 0.3)
    assert torch.equal(second.tokens, batch.action_mask & (batch.advantages < 0) & (values >= low) & (values < high))


def test_products_are_those_of_the_policys_gradients(policy, batch, tokens, cells, products):
    """The quickstart's model and this one are small enough to be exact."""
    number = int(batch.prompts.max()) + 1
    chosen = max(range(len(cells)), key=lambda i: int(cells[i].tokens.sum()))

    def of_prompts(selected):
        masks = [selected & (batch.prompts == p)[:, None] for p in range(number)]
        return torch.stack([flat(policy.gradient(batch, tokens.log_probs, batch.advantages, m)) for m in masks])

    part, whole = of_prompts(cells[chosen].tokens), of_prompts(batch.action_mask)
    assert torch.allclose(products.with_whole[chosen].float(), part @ whole.T, rtol=1e-4, atol=1e-8)
    assert torch.allclose(products.own[chosen].float(), part @ part.T, rtol=1e-4, atol=1e-8)
    # Cells add up to the whole, and so do their products with it.
    total = products.with_whole[:-1].sum(dim=0)
    assert torch.allclose(total, products.with_whole[-1], rtol=1e-3, atol=1e-5 * total.abs().max().item())
    assert torch.equal(products.with_whole[-1], products.own[-1])


def test_shares_add_up_to_one_and_contributions_to_the_wholes_cosine(products):
    *found, whole = gradient_agreement.measure(products)
    found = [one for one in found if one]
    assert sum(one["share"] for one in found) == pytest.approx(1, abs=1e-4)
    assert whole["share"] == whole["norm"] == 1
    assert sum(one["contribution"] for one in found) == pytest.approx(whole["cosine"], abs=1e-4)


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_the_cosine_is_the_one_over_all_ways_to_halve_the_prompts(signal):
    """The halves {0, 1, 2} and {3, 4, 5}, {0, 1, 3} and {2, 4, 5}, ...: 20 of them, each in both directions."""
    parts = torch.randn(2, 6, 30, generator=torch.Generator().manual_seed(0)).double() + signal
    whole = parts.sum(dim=0)
    inner, norm, norm_of_whole = 0.0, 0.0, 0.0
    for half in itertools.combinations(range(6), 3):
        a, b = list(half), [p for p in range(6) if p not in half]
        inner += (parts[0, a].sum(dim=0) @ whole[b].sum(dim=0)).item() / 20
        norm += parts[0, a].sum(dim=0).square().sum().item() / 20
        norm_of_whole += whole[b].sum(dim=0).square().sum().item() / 20
    found = gradient_agreement.measure(products_of(parts))[0]
    assert found["cosine"] == pytest.approx(inner / (norm * norm_of_whole) ** 0.5)
    assert found["contribution"] == pytest.approx(inner / norm_of_whole)
    g_c, g = parts[0].sum(dim=0), whole.sum(dim=0)
    assert found["share"] == pytest.approx((g_c @ g / (g @ g)).item())
    assert found["norm"] == pytest.approx((g_c.norm() / g.norm()).item())


def test_an_interval_holds_what_is_there():
    """Of noise, fewer than 1 in 20 intervals miss 0. A cell with signal is found beside a larger one of noise."""
    generator = torch.Generator().manual_seed(0)
    misses, found_signal, found_noise, runs = 0, 0, 0, 60
    for _ in range(runs):
        noise = torch.randn(2, 24, 200, generator=generator).double()
        misses += sum(not one["low"] <= 0 <= one["high"] for one in gradient_agreement.measure(products_of(noise)))
        planted = noise * torch.tensor([0.5, 2.0]).double()[:, None, None]
        planted[0] += 0.3
        signal, larger, _ = gradient_agreement.measure(products_of(planted))
        assert larger["norm"] > signal["norm"]
        found_signal += signal["low"] > 0
        found_noise += larger["low"] > 0
    assert misses <= 0.05 * 3 * runs
    assert found_signal == runs and found_noise <= 0.05 * runs


def test_random_advantages_agree_with_nothing_and_those_of_a_rule_do(policy, batch, tokens):
    """The batch's rewards go by the response, and are alike in all prompts. Shuffled among them they are noise."""
    of_response = batch.advantages.sum(dim=1) / batch.action_mask.sum(dim=1)
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.cat([of_response[batch.prompts == p][torch.randperm(3, generator=generator)] for p in range(8)])
    noise = dataclasses.replace(batch, advantages=shuffled[:, None] * batch.action_mask)
    found = {}
    for name, its_batch in (("rule", batch), ("noise", noise)):
        cells = gradient_agreement.make_cells(its_batch, tokens, "probability")
        found[name] = gradient_agreement.measure(
            gradient_agreement.inner_products(policy, its_batch, tokens.log_probs, cells)
        )
    assert found["rule"][-1]["low"] > 0.5
    assert all(one["low"] <= 0 <= one["high"] for one in found["noise"] if one)


def test_the_bootstrap_follows_its_seed(products):
    first = gradient_agreement.measure(products, seed=0)
    assert first == gradient_agreement.measure(products, seed=0)
    other = gradient_agreement.measure(products, seed=1)
    assert first[-1]["cosine"] == other[-1]["cosine"] and first[-1]["low"] != other[-1]["low"]


def test_a_cell_without_tokens_has_no_numbers():
    parts = torch.ones(2, 8, 4).double()
    parts[1] = 0
    _, empty, whole = gradient_agreement.measure(products_of(parts))
    assert (
        empty is None and gradient_agreement.standing(empty) == "no gradient" and whole["cosine"] == pytest.approx(1)
    )
    assert gradient_agreement.measure(products_of(0 * parts)) == [None, None, None]


def test_a_sketch_keeps_inner_products():
    generator = torch.Generator().manual_seed(0)
    # Numbers of one sign: without random signs, those that share a place would add up.
    a, b = ([torch.rand(n, generator=generator) for n in (700, 3000, 1300)] for _ in range(2))
    exact, folded = flat(a) @ flat(b), gradient_agreement.sketch(a, 1009) @ gradient_agreement.sketch(b, 1009)
    assert len(gradient_agreement.sketch(a, 1009)) == 1009
    assert abs(folded - exact) < 4 / 1009**0.5 * flat(a).norm() * flat(b).norm()
    small = gradient_agreement.sketch(a, 6007)
    assert torch.equal(small[:5000].abs(), flat(a)) and not small[5000:].any()


def test_what_the_picture_and_the_report_show(policy, batch, tokens):
    data = gradient_agreement.analyze(policy, batch, tokens, "entropy", seed=0)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert sum(cell["tokens"] for cell in data["cells"]) == int((batch.advantages != 0).sum())
    assert sum(cell["logit_share"] for cell in data["cells"]) == pytest.approx(1)
    assert data["prompts"] == 8 and data["whole"]["low"] > 0 and "ar" in data["methods"]


def test_few_prompts_are_too_few(policy, batch, tokens):
    advantages = batch.advantages * (batch.prompts < 7)[:, None]
    assert (
        gradient_agreement.analyze(policy, dataclasses.replace(batch, advantages=advantages), tokens, "entropy", 0)
        is None
    )
