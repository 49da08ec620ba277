"""What holds of the measures of an evaluation for all scores."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arlopti_openrlhf.evaluation.measures import Response, estimate_mean, estimate_source, pass_at_k
from arlopti_openrlhf.evaluation.sampling import parse_sampling

RESPONSES = st.builds(
    Response, st.sampled_from([0.0, 1.0]), st.sampled_from([None, False, True]), st.integers(0, 10**6), st.booleans()
)


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0, 1e-200]), min_size=1))
def test_a_mean_of_rates_lies_in_its_interval_and_both_in_the_unit(values):
    estimate = estimate_mean(values)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.standard_error >= 0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.randoms(use_true_random=False))
def test_a_mean_knows_no_order(values, random):
    shuffled = random.sample(values, len(values))
    assert estimate_mean(shuffled, bounded=False) == pytest.approx(estimate_mean(values, bounded=False), abs=1e-5)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_is_a_probability_that_grows(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, right, k)
    assert 0 <= value <= 1
    assert pass_at_k(n, right, 1) == pytest.approx(right / n)
    assert k == n or value <= pass_at_k(n, right, k + 1)
    assert right == n or value <= pass_at_k(n, right + 1, k)


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(RESPONSES, min_size=n, max_size=n), min_size=1)))
def test_every_measure_of_a_source_lies_in_its_interval(problems):
    estimates = estimate_source(problems)
    for name, estimate in estimates.items():
        assert estimate.low <= estimate.value <= estimate.high
        assert name == "response_length" or 0 <= estimate.low and estimate.high <= 1
    n = len(problems[0])
    assert n == 1 or estimates[f"pass@{n}"].value >= estimates["accuracy"].value - 1e-12


@given(st.one_of(st.text(), st.from_regex(r".*:n=\d+,t=[\d.]*", fullmatch=True)))
def test_a_sampling_is_parsed_or_refused(text):
    try:
        sampling = parse_sampling(text)
    except argparse.ArgumentTypeError:
        return
    assert sampling.n >= 1 and sampling.temperature >= 0
