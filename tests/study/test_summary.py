"""A result says what a run's log shows, also where training diverged."""

import math

import pytest
from arlopti_testing.study_fakes import of_name, scalars

from study import runs
from study.summary import HIGH_BINS, LOW_BINS, collapsed, median_and_max, over_bins, step_seconds, summarize, thinned


def test_summary_of_a_run():
    summary = summarize(of_name("grpo-0"), scalars())
    source = f"kk_{runs.PEOPLE[0]}ppl"
    assert summary["before"][source]["accuracy"] == [0.25, 0.2, 0.3]
    assert summary["after"][source]["greedy"] == [0.5, 0.4, 0.6]
    assert summary["curves"]["reward"] == [1, 1, 2, 2] and summary["grad_norm"] == {"median": 0.5, "max": 1.5}
    assert step_seconds(scalars()) == {
        "step": 2.0,
        "generation": 2.0,
        "update": 2.0,
    }  # without the 9 s of the first


def test_lopti_has_a_gradient_norm_for_each_stage():
    found = scalars(**{f"train/lopti/{group}/actor_grad_norm": [1.0, 2.0, 3.0, 9.0] for group in ("low", "high")})
    del found["train/lopti/low/actor_grad_norm"][2]  # a step without low tokens
    summary = summarize(of_name("lopti-0"), found)
    assert summary["grad_norm_low"] == {"median": 2.0, "max": 9.0} and "grad_norm" not in summary
    assert summary["curves"]["grad_norm_low"] == [1.0, 2.0, None, 9.0]
    assert summary["curves"]["grad_norm_high"] == [1.0, 2.0, 3.0, 9.0] and not summary["collapsed"]


def test_a_norm_that_is_not_finite_is_no_number_of_the_result():
    summary = summarize(of_name("grpo-0"), scalars(**{"train/actor_grad_norm": [0.5, -1.0, math.nan, 1.5]}))
    assert summary["collapsed"] and summary["grad_norm"] == {"median": 1.0, "max": 1.5}
    assert summary["curves"]["grad_norm"] == [0.5, None, None, 1.5]
    assert median_and_max([-1.0]) == {"median": None, "max": None}


def test_one_group_alone_has_no_statistics_of_all_tokens():
    summary = summarize(of_name("only-low-0"), scalars(**{"train/lopti/low_share": [0.1, 0.2, 0.3, 0.4]}))
    assert summary["curves"]["low_share"] == [0.1, 0.2, 0.3, 0.4]
    assert not {"entropy", "low_grad_share"} & summary["curves"].keys()


def test_a_token_methods_weights_are_its_own():
    """Beside the mean that they are divided by."""
    shares = {"train/token_method/ar/mean_weight": [1.0, 2.0, 3.0, 4.0], "train/token_method/ar/zero_share": [0.0] * 4}
    found = scalars(**shares, **{"train/token_method/mean_weight": [9.0] * 4})
    curves = summarize(of_name("noise-ar-mean-one-0"), found)["curves"]
    assert curves["mean_weight"] == [1.0, 2.0, 3.0, 4.0] and curves["zero_share"] == [0.0] * 4
    assert "mean_weight" not in summarize(of_name("noise-grpo-0"), scalars())["curves"]


def test_shares_and_means_over_the_bins():
    # Step 0: 20% of the tokens below 0.25 with entropy 2, 80% above 0.75 with 0.5: 0.4 + 0.4. Step 1: all above.
    found = {
        "train/rollout/reward_mean": {0: 0.0, 1: 0.0},
        "train/tokens/p0.00-0.25/share": {0: 0.2, 1: 0.0},
        "train/tokens/p0.00-0.25/entropy": {0: 2.0},
        "train/tokens/p0.75-1.00/share": {0: 0.8, 1: 1.0},
        "train/tokens/p0.75-1.00/entropy": {0: 0.5, 1: 0.25},
    }
    assert over_bins(found, LOW_BINS, "share") == [0.2, 0.0]
    assert over_bins(found, LOW_BINS + HIGH_BINS, "entropy") == pytest.approx([0.8, 0.25])


def test_collapse():
    assert not collapsed([1.0, 1.0, 1.0, 1.0, 1.0], [0.1])
    assert collapsed([1.0, 2.0, 2.0, 2.0, 0.9], [0.1])
    assert collapsed([1.0, 2.0], [math.nan]) and collapsed([1.0, 2.0], [math.inf])
    assert collapsed([1.0, 2.0], [0.1, -1.0])  # what DeepSpeed says of a norm that is not finite
    # A fifth of 10 steps are 2: -1 + 3 at the end against 0 + 1.
    assert not collapsed([0, 1, 2, 2, 2, 2, 2, 2, -1, 3], [0.1])


def test_curves_are_means_of_stretches():
    assert thinned([1.0, 2.0]) == [1.0, 2.0]
    assert thinned([1.0] * 20 + [2.0] * 20) == [1.0] * 10 + [2.0] * 10
    assert thinned([1 / 3] * 41)[-1] == 0.3333
    assert thinned([1.0, math.nan, math.inf]) == [1.0, None, None]
