"""A summary says what a run's log shows, also where training diverged."""

import math

from study.summary import along, median_and_max, step_seconds, thinned

REWARD = "train/rollout/reward_mean"


def test_times_leave_out_the_step_that_warms_up():
    names = ("step_total", "generation", "ppo_train")
    scalars = {f"train/timing/{name}": dict(enumerate([9.0, 1.0, 2.0, 3.0])) for name in names}
    assert step_seconds(scalars) == {"step": 2.0, "generation": 2.0, "update": 2.0}


def test_a_norm_that_is_not_finite_is_no_number_of_the_row():
    norms = {0: 0.5, 1: -1.0, 3: 1.5}  # DeepSpeed's -1; step 2 had no such norm
    scalars = {REWARD: dict.fromkeys(range(4), 1.0), "train/actor_grad_norm": norms}
    assert thinned(along(scalars, "train/actor_grad_norm")) == [0.5, None, None, 1.5]
    assert median_and_max(norms.values()) == {"median": 1.0, "max": 1.5}
    assert median_and_max([-1.0, math.nan]) == {"median": None, "max": None}


def test_curves_are_means_of_stretches():
    assert thinned([1.0, 2.0]) == [1.0, 2.0]
    assert thinned([1.0] * 20 + [2.0] * 20) == [1.0] * 10 + [2.0] * 10
    assert thinned([1 / 3] * 41)[-1] == 0.3333
    assert thinned([1.0, math.nan, math.inf]) == [1.0, None, None]
