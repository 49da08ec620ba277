"""The paper's formulas against arithmetic written out here, in float64 unless float32 is the point."""

import math

import pytest
import torch

from arlopti_openrlhf.token_update import (
    advantage_weights,
    low_probability_mask,
    probability_quantile,
)


def random_batch(seed: int = 0, shape=(4, 9), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(shape, generator=generator, dtype=torch.float64).mul(4)
    mask = torch.rand(shape, generator=generator) < 0.7
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    return advantages.to(dtype), log_probs.to(dtype), mask


def test_reweighting_by_hand():
    # α = 0.3: weights 0.3·p + 0.7, that is 1.0, 0.85 and 0.73 for p = 1, 1/2 and 1/10.
    log_probs = torch.tensor([[0.0, math.log(0.5), math.log(0.1)]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, -2.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[2.0, -1.7, 0.73]], dtype=torch.float64)
    torch.testing.assert_close(advantage_weights(log_probs, 0.3) * advantages, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_alpha_zero_is_bitwise_the_identity(dtype):
    advantages, log_probs, _ = random_batch(dtype=dtype)
    advantages[0, 0], advantages[0, 1], log_probs[0, 2] = -0.0, float("inf"), -float("inf")
    result = advantage_weights(log_probs, 0.0) * advantages
    assert torch.equal(result, advantages.to(result.dtype))
    assert torch.equal(torch.signbit(result), torch.signbit(advantages))


def test_weights_are_computed_in_float32():
    _, log_probs, _ = random_batch(dtype=torch.bfloat16)
    assert torch.equal(advantage_weights(log_probs, 0.3), 0.3 * log_probs.float().exp() + 0.7)


def test_low_group_is_strictly_below_eta_and_never_padding():
    half = math.log(0.5)
    assert math.exp(half) == 0.5
    log_probs = torch.tensor([[half, half - 1e-6, -9.0, 0.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    assert low_probability_mask(log_probs, mask, 0.5).tolist() == [[False, True, True, False, False]]


@pytest.mark.parametrize("q", [0.01, 0.1, 0.25, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 1000])
def test_quantile_selects_its_share(q, tokens):
    generator = torch.Generator().manual_seed(tokens)
    log_probs = torch.rand((1, 2 * tokens), generator=generator).log()
    mask = torch.zeros(1, 2 * tokens)
    mask[0, torch.randperm(2 * tokens, generator=generator)[:tokens]] = 1
    eta = probability_quantile(log_probs, mask, q)
    share = low_probability_mask(log_probs, mask, eta).sum().item() / tokens
    assert abs(share - q) <= 1 / tokens
    reference = torch.quantile(log_probs.exp()[mask.bool()].double(), q).item()
    assert eta == pytest.approx(reference, rel=1e-6)


def test_quantile_of_more_tokens_than_torch_quantile_takes():
    tokens = 2**24 + 3
    log_probs = torch.linspace(1e-6, 1, tokens).log()[None]
    assert probability_quantile(log_probs, torch.ones_like(log_probs), 0.25) == pytest.approx(0.25, abs=1e-5)


def test_quantile_where_most_tokens_are_certain():
    # Nine of ten have probability 1: the median is 1, and strictly below lies just the tenth.
    log_probs = torch.zeros(1, 10)
    log_probs[0, 3] = -1.0
    eta = probability_quantile(log_probs, torch.ones(1, 10), 0.5)
    assert eta == 1.0 and low_probability_mask(log_probs, torch.ones(1, 10), eta).sum() == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a, x, m: advantage_weights(x, float("nan")), "alpha must lie in"),
        (lambda a, x, m: low_probability_mask(x, m, 0.0), "eta must lie in"),
        (lambda a, x, m: low_probability_mask(x, m, 1.5), "eta must lie in"),
        (lambda a, x, m: low_probability_mask(x, m[:2], 0.5), "one shape"),
        (lambda a, x, m: probability_quantile(x, m, 0.0), "q must lie in"),
        (lambda a, x, m: probability_quantile(x, m, 1.0), "q must lie in"),
        (lambda a, x, m: probability_quantile(x, torch.zeros_like(m), 0.5), "selects no token"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*random_batch())
