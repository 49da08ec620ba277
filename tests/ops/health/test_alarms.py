"""Alarms begin and end with a line, and have a metric at every step."""

import math
from types import SimpleNamespace

import pytest
import torch

from arlopti_openrlhf.ops.health.alarms import Alarms, rollout_figures, what_is_bad

GOOD = {
    "skipped_optimizer_steps": 0,
    "rollout/zero_advantage_groups": 0.5,
    "rollout/reward_min": 0.0,
    "rollout/reward_max": 1.0,
    "rollout/gap": 0.01,
    "rollout/truncated_rate": 0.9,
    "actor_grad_norm": 1.0,
}
BAD = {
    "skipped_steps": {"skipped_optimizer_steps": 2},
    "zero_advantages": {"rollout/zero_advantage_groups": 1.0},
    "flat_reward": {"rollout/reward_max": 0.0},
    "rollout_gap": {"rollout/gap": 0.11},
    "grad_norm": {"actor_grad_norm": 10.1},
    "penalty": {"rollout/reward_min": -1.0},
    "truncated": {"rollout/truncated_rate": 1.0},
}


def alarms(flat_reward_steps: int = 1, coefficient: float | None = 0.5, top_p=1.0, level="token") -> Alarms:
    reward, rollout = SimpleNamespace(stop_properly_penalty_coef=coefficient), SimpleNamespace(top_p=top_p)
    algo = SimpleNamespace(advantage=SimpleNamespace(is_correction_level=level))
    made = Alarms(SimpleNamespace(reward=reward, rollout=rollout, algo=algo))
    made.flat_reward_steps = flat_reward_steps
    return made


@pytest.mark.parametrize("name", BAD)
def test_each_alarm_is_said_when_it_begins_and_when_it_ends(name):
    watch = alarms()
    for _ in range(10):
        metrics, lines = watch.check(GOOD)
        assert lines == [] and metrics == dict.fromkeys((f"alarm/{alarm}" for alarm in BAD), 0.0)
    metrics, lines = watch.check(GOOD | BAD[name])
    assert [other for other, is_on in metrics.items() if is_on] == [f"alarm/{name}"]
    (line,) = lines
    assert line.startswith(f"alarm {name}: ")
    assert watch.check(GOOD | BAD[name])[1] == []
    metrics, lines = watch.check(GOOD)
    assert lines == [f"alarm {name} is over"] and not any(metrics.values())


@pytest.mark.parametrize("name", [name for name in BAD if name not in ("flat_reward", "grad_norm")])
def test_figures_that_are_missing_raise_no_alarm(name):
    assert not any(alarms().check({})[0].values())
    assert alarms().check(BAD[name])[0][f"alarm/{name}"] == 1


def test_a_gap_that_is_no_number_is_an_alarm_until_another_is_measured():
    watch = alarms()
    seen = [watch.check(figures)[0]["alarm/rollout_gap"] for figures in ({"rollout/gap": math.nan}, {}, GOOD, {})]
    assert seen == [1, 1, 0, 0]


def test_a_cut_in_the_distribution_is_named_beside_the_gap_that_it_makes():
    """-ln 0.7 = 0.357: vLLM's log-probs are those among the tokens that top_p leaves."""
    assert "--rollout.top_p 0.7 alone makes up to 0.357" in alarms(top_p=0.7).check({"rollout/gap": 0.356})[1][0]
    for watch in (alarms(top_p=0.7, level="off"), alarms()):
        assert "top_p" not in watch.check({"rollout/gap": 0.356})[1][0]


@pytest.mark.parametrize("coefficient, raised", [(None, 0), (-1.0, 0), (1.0, 0), (0.0, 1), (0.5, 1)])
def test_a_penalty_that_raises_rewards(coefficient, raised):
    assert alarms(coefficient=coefficient).check({"rollout/reward_min": -3.0})[0]["alarm/penalty"] == raised


def test_a_flat_reward_takes_steps_in_a_row():
    watch = alarms(flat_reward_steps=3, coefficient=None)
    flat = GOOD | {"rollout/reward_max": 0.0}
    seen = [watch.check(figures)[0]["alarm/flat_reward"] for figures in (flat, flat, GOOD, flat, flat, flat, GOOD)]
    assert seen == [0, 0, 0, 0, 0, 1, 0]
    # A reward that is the lowest so far, and the same for all, is flat; one above it is not.
    lower = {"rollout/reward_min": -3.0, "rollout/reward_max": -3.0}
    above = {"rollout/reward_min": 0.0, "rollout/reward_max": 0.0}
    assert [watch.check(lower)[0]["alarm/flat_reward"] for _ in range(3)] == [0, 0, 1]
    assert watch.check(above)[0]["alarm/flat_reward"] == 0


def test_a_gradient_norm_is_compared_with_the_median_of_its_own_last_hundred():
    def norms(low: float, high: float) -> dict:
        return {"lopti/low/actor_grad_norm": low, "lopti/high/actor_grad_norm": high}

    watch = alarms()
    assert not any(watch.check(norms(1, 1000))[0]["alarm/grad_norm"] for _ in range(9))
    assert watch.check(norms(1000, 1000))[0]["alarm/grad_norm"] == 0  # the tenth step
    assert watch.check(norms(11, 1000))[0]["alarm/grad_norm"] == 1
    # What is no norm, and the 0 of a step without advantages, is neither compared nor remembered.
    for value in (math.nan, 0.0):
        for _ in range(100):
            assert watch.check(norms(value, value))[0]["alarm/grad_norm"] == 0
    assert watch.check(norms(9, 1000))[0]["alarm/grad_norm"] == 0
    # After a hundred steps of another size the old ones are forgotten.
    for _ in range(100):
        watch.check(norms(100, 1000))
    assert watch.check(norms(900, 1000))[0]["alarm/grad_norm"] == 0


def test_figures_of_a_rollout_batch():
    """Three prompts of two samples, in the order 4 1 | 0 5 3 2. Prompt 0 has an advantage in padding alone."""
    advantages = {0: [0.0, 9.0], 1: [0.0, 0.0], 2: [0.0, 0.0], 3: [0.0, -0.5], 4: [0.0, 0.0], 5: [0.0, 0.0]}
    masks = {sample: [1, 1] for sample in advantages} | {0: [1, 0]}

    def micro_batch(*index: int) -> SimpleNamespace:
        return SimpleNamespace(
            index=list(index),
            advantages=torch.tensor([advantages[i] for i in index]),
            action_mask=torch.tensor([masks[i] for i in index]),
            info={"reward": torch.tensor([float(i) for i in index])},
        )

    assert rollout_figures([micro_batch(4, 1), micro_batch(0, 5, 3, 2)], 2) == {
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 5.0,
        "rollout/zero_advantage_groups": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({}, ""),
        ({"policy_loss": math.nan}, "policy_loss is nan"),
        ({"lopti/low/policy_loss": math.inf}, "lopti/low/policy_loss is inf"),
        ({"critic_loss": -math.inf}, "critic_loss is -inf"),
        ({"kl": math.nan, "skipped_optimizer_steps": 1}, "kl is nan, 1 optimizer steps refused"),
        ({"skipped_optimizer_steps": 1, "critic_grad_norm": math.nan}, "2 optimizer steps refused"),
    ],
)
def test_what_is_bad_about_a_step(figures, cause):
    good = {"policy_loss": 0.1, "kl": 0.0, "reward": math.nan, "generated_samples": ["", 0.0]}
    assert what_is_bad(GOOD | good | figures, counts_refusals=True) == cause
    # In fp16 a refusal alone is the search for a loss scale.
    is_only_refused = set(figures) == {"skipped_optimizer_steps", "critic_grad_norm"}
    assert what_is_bad(GOOD | good | figures, counts_refusals=False) == ("" if is_only_refused else cause)
