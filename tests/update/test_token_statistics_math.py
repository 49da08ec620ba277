"""Eq. 15's norm against autograd, Proposition 4.2's bounds, and the bins, which must not lose a token."""

import math

import pytest
import torch

from arlopti_openrlhf.lab.analysis.figures import logit_gradient_bounds
from arlopti_openrlhf.update.token_statistics import EDGES, bin_index, logit_gradient_norm


def statistics(logits: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) log π of the sampled tokens and (N,) Σ_{j≠o} P_j²."""
    log_probs = logits.log_softmax(dim=-1)
    rest = log_probs.exp().scatter(-1, sampled[:, None], 0.0)
    return log_probs.gather(-1, sampled[:, None])[:, 0], rest.square().sum(dim=-1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])
def test_logit_gradient_norm_is_autograds_in_float64(scale):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(200, 97, generator=generator, dtype=torch.float64)).requires_grad_()
    sampled = torch.randint(97, (200,), generator=generator)
    weights = torch.randn(200, generator=generator, dtype=torch.float64)
    log_probs, squared_rest = statistics(logits, sampled)
    (weights * log_probs).sum().backward()
    norm = logit_gradient_norm(weights, log_probs.detach(), squared_rest.detach())
    assert torch.allclose(norm, logits.grad.norm(dim=-1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("vocabulary", [2, 3, 50, 1000])
def test_logit_gradient_norm_lies_within_the_bounds_of_proposition_4_2(vocabulary):
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** torch.linspace(-2, 1.5, 500, dtype=torch.float64)[:, None]
    logits = scales * torch.randn(500, vocabulary, generator=generator, dtype=torch.float64)
    log_probs, squared_rest = statistics(logits, torch.randint(vocabulary, (500,), generator=generator))
    norm = logit_gradient_norm(torch.ones(500, dtype=torch.float64), log_probs, squared_rest)
    lower, upper = logit_gradient_bounds(log_probs.exp(), vocabulary)
    assert (norm >= lower - 1e-12).all() and (norm <= upper + 1e-12).all()


def test_bounds_are_reached_by_the_distributions_that_the_proof_names():
    # Lower: the others share the rest evenly. V = 5, π = 0.6: (0.4² + 4 · 0.1²)^½ = 0.2^½ = 0.4 · (5/4)^½.
    # Upper: one other has all the rest. (0.4² + 0.4²)^½ = 0.4 · √2.
    log_pi = torch.tensor([0.6], dtype=torch.float64).log()
    one = torch.ones(1, dtype=torch.float64)
    lower, upper = logit_gradient_bounds(log_pi.exp(), 5)
    even = logit_gradient_norm(one, log_pi, torch.tensor([4 * 0.1**2], dtype=torch.float64))
    single = logit_gradient_norm(one, log_pi, torch.tensor([0.4**2], dtype=torch.float64))
    assert torch.allclose(even, lower, rtol=0, atol=1e-15) and torch.allclose(single, upper, rtol=0, atol=1e-15)
    assert even.item() == pytest.approx(math.sqrt(0.2)) and single.item() == pytest.approx(0.4 * math.sqrt(2))


@pytest.mark.parametrize("gap", [1e-6, 1e-4, 1e-2, 1.0, 20.0, 60.0])
def test_float32_holds_where_the_probability_is_nearly_0_or_1(gap):
    # Two tokens: 1 - π = σ(-gap) for the likelier one, and the norm is √2 · (1 - π) for either, at π near 0 as near 1.
    logits = torch.tensor([[gap, 0.0], [0.0, gap]])
    rest = torch.sigmoid(torch.tensor([-gap, gap], dtype=torch.float64))
    log_probs = logits.log_softmax(dim=-1)[:, 0]
    other = logits.log_softmax(dim=-1)[:, 1].exp()
    norm = logit_gradient_norm(torch.ones(2), log_probs, other.square())
    # float32's log-softmax rounds its result to 6e-8 of the largest logit.
    tolerance = 1e-6 + 1e-6 * rest
    assert norm.isfinite().all() and ((norm.double() - math.sqrt(2) * rest).abs() <= tolerance).all()


def test_norm_of_a_certain_token_and_of_no_weight_is_zero():
    norm = logit_gradient_norm(torch.tensor([1.0, 0.0]), torch.tensor([0.0, -3.0]), torch.tensor([0.0, 0.5]))
    assert torch.equal(norm, torch.zeros(2))


def test_bins_partition_the_range_and_an_edge_belongs_to_the_bin_above():
    below = [math.nextafter(edge, 0.0) for edge in EDGES[1:]]
    values = torch.tensor([0.0, *below, *EDGES[1:]], dtype=torch.float64)
    assert bin_index(values).tolist() == [0, 0, 1, 2, 3, 1, 2, 3, 3]
    assert bin_index(torch.tensor([[0.3, 0.995]]), (0.0, 0.5, 0.99, 1.0)).tolist() == [[0, 2]]
