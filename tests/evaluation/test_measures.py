"""The measures equal arithmetic written here, and their intervals hold up in sampling."""

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arlopti_openrlhf.evaluation.measures import Response, estimate_mean, estimate_source, pass_at_k

RESPONSES = st.builds(
    Response, st.sampled_from([0.0, 1.0]), st.sampled_from([None, False, True]), st.integers(0, 10**6), st.booleans()
)


def test_pass_at_k_counts_the_subsets():
    for n, c in ((5, 0), (5, 2), (6, 5), (4, 4)):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_one_sample_per_problem_gives_wilsons_interval():
    values = [1.0] * 7 + [0.0] * 23
    estimate, n, p, z = estimate_mean(values), 30, 7 / 30, 1.959964
    effective = p * (1 - p) / estimate.standard_error**2
    assert effective == pytest.approx(n - 1)
    center, spread = p + z**2 / (2 * effective), z * math.sqrt(p * (1 - p) / effective + z**2 / (4 * effective**2))
    assert estimate.low == pytest.approx((center - spread) / (1 + z**2 / effective))
    assert estimate.high == pytest.approx((center + spread) / (1 + z**2 / effective))


def test_all_wrong_and_all_right_are_no_points():
    low, high = estimate_mean([0.0] * 30), estimate_mean([1.0] * 30)
    assert low.low == 0 and 0.05 < low.high < 0.2
    assert high.high == 1 and high.low == pytest.approx(1 - low.high)


def test_the_interval_holds_the_truth_95_times_of_100():
    """Draw problems of different difficulty, with 8 samples each that are not independent."""
    rng, hits, trials = random.Random(0), 0, 600
    for _ in range(trials):
        difficulties = [rng.betavariate(0.3, 1.2) for _ in range(60)]  # of mean 0.2
        estimate = estimate_mean([fmean(rng.random() < p for _ in range(8)) for p in difficulties])
        hits += estimate.low <= 0.2 <= estimate.high
    assert 0.92 < hits / trials < 0.98


def test_measures_of_a_source():
    right, wrong = Response(1.0, True, 10, False), Response(0.0, False, 30, True)
    estimates = estimate_source({"p": [[right, wrong, wrong, wrong]], "q": [[right, right, right, right]]})
    values = {name: estimate.value for name, estimate in estimates.items()}
    assert values == {
        "accuracy": 5 / 8,
        "pass@2": pytest.approx((0.5 + 1) / 2),
        "pass@4": 1.0,
        "well_formed": 5 / 8,
        "truncated": 3 / 8,
        "response_length": (25 + 10) / 2,
    }
    assert list(estimate_source({0: [[right] * 6]})) == [
        "accuracy",
        "pass@2",
        "pass@4",
        "pass@6",
        "well_formed",
        "truncated",
        "response_length",
    ]
    assert list(estimate_source({0: [[right]]})) == ["accuracy", "well_formed", "truncated", "response_length"]


def test_rows_of_a_problem_are_one_problem():
    """As in AIME's published files, which have each problem 32 times."""
    right, wrong = Response(1.0, None, 10, False), Response(0.0, None, 10, False)
    once = estimate_source({"p": [[right, wrong]], "q": [[wrong, wrong]]})
    often = estimate_source({"p": [[right, wrong]] * 32, "q": [[wrong, wrong]] * 8})
    assert once == often and once["accuracy"].value == 0.25 and once["pass@2"].value == 0.5


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
    estimates = estimate_source({i: [row] for i, row in enumerate(problems)})
    for name, estimate in estimates.items():
        assert estimate.low <= estimate.value <= estimate.high
        assert name == "response_length" or 0 <= estimate.low and estimate.high <= 1
    n = len(problems[0])
    assert n == 1 or estimates[f"pass@{n}"].value >= estimates["accuracy"].value - 1e-12


def test_grades_of_another_range_have_a_mean_and_say_not_what_is_right():
    """A judge's 1 to 5: (5 + 1) / 2 = 3 and (4 + 2) / 2 = 3, with a spread of 0 between problems."""
    answers = [[Response(score, None, 7, False) for score in problem] for problem in ((5.0, 1.0), (4.0, 2.0))]
    estimates = estimate_source({i: [row] for i, row in enumerate(answers)})
    assert list(estimates) == ["score", "truncated", "response_length"] and estimates["score"][:3] == (3.0, 3.0, 3.0)
    assert list(estimate_source({0: [[Response(0.5, None, 7, False)]]}))[0] == "accuracy"  # partial credit
    assert list(estimate_source({0: [[Response(0.5, None, 7, False)]]}, may_be_rates=False))[0] == "score"
