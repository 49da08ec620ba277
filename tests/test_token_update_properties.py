"""What holds of the paper's formulas for every batch: of any dtype, with -inf, padding and extreme settings."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from arlopti_openrlhf.methods import lopti
from arlopti_openrlhf.token_method import Tokens
from arlopti_openrlhf.token_update import (
    advantage_weights,
    low_probability_mask,
    probability_quantile,
    token_probabilities,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Rounded up, a log-prob may be a little above 0. Below -103 its float32 probability is 0.
LOG_PROBS = st.one_of(st.floats(-120, 0), st.sampled_from([0.0, -0.0, 1e-7, 1e-3, -1e-8, -200.0, float("-inf")]))
UNIT = st.floats(0, 1)
INSIDE = st.floats(0, 1, exclude_min=True, exclude_max=True)


@st.composite
def batches(draw, min_tokens=0):
    """Return log π_old and the mask, (B, A)."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    cells = rows * columns
    log_probs = draw(st.lists(LOG_PROBS, min_size=cells, max_size=cells))
    mask = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    if sum(mask) < min_tokens:
        mask[0] = True
    log_probs = torch.tensor(log_probs, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))
    mask = torch.tensor(mask).to(draw(st.sampled_from([torch.bool, torch.long, torch.float32])))
    return log_probs.reshape(rows, columns), mask.reshape(rows, columns)


def groups(log_probs, mask, eta):
    """Return Lopti's two groups."""
    return lopti.weigh(Tokens(log_probs, log_probs, mask), None, eta=eta).values()


@given(batches(), INSIDE)
def test_the_two_groups_partition_the_response(batch, eta):
    log_probs, mask = batch
    low, high = groups(log_probs, mask, eta)
    assert low.dtype == high.dtype == torch.bool
    assert not (low & high).any() and torch.equal(low | high, mask.bool())


@given(batches(), INSIDE, INSIDE)
def test_a_higher_threshold_selects_no_fewer_tokens(batch, first, second):
    low, high = (low_probability_mask(*batch, eta) for eta in sorted((first, second)))
    assert not (low & ~high).any()


@given(batches(), UNIT)
def test_ar_weights_lie_between_one_minus_alpha_and_one(batch, alpha):
    log_probs = batch[0].clamp(max=0)
    weights = advantage_weights(log_probs, alpha)
    epsilon = 2 * torch.finfo(weights.dtype).eps
    assert weights.dtype == torch.promote_types(log_probs.dtype, torch.float32)
    assert (weights >= 1 - alpha - epsilon).all() and (weights <= 1 + epsilon).all()


@given(batches(), UNIT, st.sampled_from(DTYPES), st.floats(-6e4, 6e4))
def test_reweighting_enlarges_nothing_and_keeps_the_sign(batch, alpha, dtype, advantage):
    log_probs = batch[0].clamp(max=0)
    advantages = torch.full(log_probs.shape, advantage, dtype=dtype)
    result = (advantage_weights(log_probs, alpha) * advantages).to(dtype)
    assert result.isfinite().all()
    assert (result * advantages.sign() >= 0).all()
    slack = 1 + 4 * torch.finfo(dtype).eps
    assert (result.abs() <= advantages.abs() * slack).all()


@given(batches(min_tokens=1), INSIDE)
def test_a_quantile_is_a_threshold_that_the_groups_take(batch, q):
    log_probs, mask = batch
    eta = probability_quantile(log_probs, mask, q)
    low, high = groups(log_probs, mask, eta)
    assert torch.equal(low | high, mask.bool())
    probabilities = token_probabilities(log_probs)[mask.bool()]
    number = len(probabilities)
    if len(probabilities.unique()) == number and probabilities.min() > 1e-30 and probabilities.max() <= 1:
        assert abs(low.sum() / number - q) <= 1 / number + 1e-6


@given(batches(min_tokens=1), INSIDE, st.randoms(use_true_random=False))
def test_a_quantile_knows_no_order(batch, q, random):
    log_probs, mask = batch
    order = list(range(log_probs.numel()))
    random.shuffle(order)
    shuffled = (tensor.flatten()[order].reshape(tensor.shape) for tensor in batch)
    assert probability_quantile(*shuffled, q) == probability_quantile(log_probs, mask, q)
