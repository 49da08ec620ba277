"""The metrics of micro-batches, passes and updates by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf.update.metrics import PassMetrics, UpdateMetrics, micro_batch_status
from arlopti_openrlhf.update.optimizer_steps import clip_factor


class TwoEqualRanks:
    """Stands in for `Ranks` where the other rank has the same figures."""

    def sum_tensor(self, tensor):
        return 2 * tensor


def status(loss: float, rewards: list[float], num_tokens: int) -> dict:
    experience = Experience(
        action_mask=torch.ones(len(rewards), 3),
        response_length=torch.tensor([float(len(rewards))] * len(rewards)),
        rewards=torch.tensor(rewards),
        info={"reward": rewards, "scalar": torch.tensor(2.0), "text": "not logged", "kl": torch.zeros(1)},
    )
    policy_loss = torch.tensor(loss, requires_grad=True)
    means = {"policy_loss": policy_loss, "kl": torch.tensor(loss / 2), "ppo_kl": torch.tensor(loss)}
    means |= {"vllm_kl": torch.tensor(loss), "is_filter_ratio": None}
    return micro_batch_status(experience, means, num_tokens, num_response_tokens=3 * len(rewards))


def test_a_micro_batchs_status_has_upstreams_form():
    found = status(0.5, [1.0, 3.0], 0)
    assert found["weights"] == {
        "policy_loss": "token",
        "ppo_kl": "token",
        "vllm_kl": "response",
        "kl": "token",
        "reward": "sample",
        "scalar": "token",
        "response_length": "sample",
    }
    assert found["metrics"].keys() == found["weights"].keys()
    assert not found["metrics"]["policy_loss"].requires_grad
    assert found["metrics"]["kl"] == 0.25  # the step's own, not the zeros that the experience maker left
    assert found["num_samples"] == 2
    assert found["num_action_tokens"] == 1e-9  # upstream divides by it


@pytest.mark.parametrize("divisor", [1, 4])
def test_means_over_micro_batches(divisor):
    """Losses 1 and 2 over 1 and 3 tokens, rewards 1 | 2, 3: scalars by tokens 7/4, rewards by samples 2.

    What is a mean over responses of 3 and 6 tokens, whichever of them the pass updates, is 5/3.

    The losses are shares of the mini-batch's, times what DeepSpeed divides by.
    """
    metrics = PassMetrics(divisor)
    metrics.add(status(1.0, [1.0], 1))
    metrics.add(status(2.0, [2.0, 3.0], 3))
    assert metrics.reduce(TwoEqualRanks()) == pytest.approx(
        {
            "policy_loss": 3 / divisor,
            "kl": 1.5 / divisor,
            "ppo_kl": 7 / 4,
            "vllm_kl": 5 / 3,
            "num_response_tokens": 18,
            "reward": 2.0,
            "scalar": 2.0,
            "response_length": 5 / 3,
        }
    )


def test_a_kl_in_the_reward_is_a_mean_over_samples():
    """OpenRLHF logs it under the name of the KL loss."""
    metrics = PassMetrics(4)
    for kl, count in ((1.0, 1), (4.0, 2)):
        metrics.add(
            {
                "metrics": {"kl": torch.full((count,), kl)},
                "weights": {"kl": "sample"},
                "num_samples": float(count),
                "num_action_tokens": 5.0,
                "num_response_tokens": 5.0,
            }
        )
    assert metrics.reduce(TwoEqualRanks())["kl"] == pytest.approx(3.0)


def test_a_micro_batch_without_tokens_counts_nothing():
    metrics = PassMetrics(1)
    metrics.add(status(1.0, [1.0], 4))
    metrics.add(status(9.0, [1.0], 0))
    assert metrics.reduce(TwoEqualRanks())["ppo_kl"] == pytest.approx(1.0)


def flags(loss_type: str = "ppo") -> SimpleNamespace:
    return SimpleNamespace(
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True)),
        actor=SimpleNamespace(policy_loss_type=loss_type, max_norm=1.0),
    )


def test_the_stages_metrics():
    """Two mini-batches: the low stage has 1 and 3 tokens, and the high one 6 and none, so that its loss there is 0.

    The sum over the stages is 1 + 4 in the first mini-batch and 3 + 0 in the second. What describes the samples is
    taken from each mini-batch once.
    """
    metrics = UpdateMetrics(flags())
    low, high = "lopti/low", "lopti/high"
    metrics.add(low, 1.0, {"policy_loss": 1.0, "ppo_kl": 1.0, "reward": 3.0, "actor_lr": 1.0, "actor_grad_norm": 5.0})
    metrics.add(low, 3.0, {"policy_loss": 3.0, "ppo_kl": 5.0, "reward": 5.0, "actor_lr": 2.0, "actor_grad_norm": 6.0})
    metrics.add(high, 6.0, {"policy_loss": 4.0, "ppo_kl": 7.0, "reward": 4.0, "actor_lr": 3.0})
    metrics.passes[high][0][1]["actor_grad_norm"] = 7.0
    metrics.add(high, 0.0, {})
    assert metrics.summary() == {
        "lopti/low/num_tokens": 4.0,
        "lopti/low/policy_loss": 2.0,  # divided by the whole mini-batch's tokens already: a plain mean
        "lopti/low/ppo_kl": (1 + 3 * 5) / 4,
        "lopti/low/actor_grad_norm": 6.0,
        "lopti/low/clip_factor": (1 / 5 + 1 / 6) / 2,  # of both optimizer steps
        "lopti/high/num_tokens": 6.0,
        "lopti/high/policy_loss": (4 + 0) / 2,
        "lopti/high/ppo_kl": 7.0,
        "lopti/high/actor_grad_norm": 7.0,
        "lopti/high/clip_factor": 1 / 7,
        "policy_loss": (5 + 3) / 2,
        "reward": (4 + 5) / 2,
        "actor_lr": 3.0,
    }


def test_a_mean_over_responses_is_that_of_the_mini_batches_whatever_a_pass_updates():
    """0.1 over 10 tokens and 0.5 over 30: 0.4."""
    metrics = UpdateMetrics(flags())
    for label, updated in (("lopti/low", (1.0, 9.0)), ("lopti/high", (9.0, 1.0))):
        for tokens, value, responses in zip(updated, (0.1, 0.5), (10.0, 30.0), strict=True):
            metrics.add(label, tokens, {"vllm_kl": value, "num_response_tokens": responses})
    names = {"lopti/low/num_tokens": 10.0, "lopti/high/num_tokens": 10.0}
    assert metrics.summary() == pytest.approx(names | {"vllm_kl": 0.4})


def test_gspos_loss_has_no_sum():
    metrics = UpdateMetrics(flags("gspo"))
    metrics.add("lopti/low", 1.0, {"policy_loss": 1.0, "kl": 1.0})
    assert metrics.summary().keys() == {"lopti/low/num_tokens", "lopti/low/policy_loss", "lopti/low/kl", "kl"}


def test_one_stage_has_upstreams_names():
    metrics = UpdateMetrics(flags())
    metrics.add("", 1.0, {"policy_loss": 1.0, "reward": 1.0, "actor_grad_norm": 1.0})
    metrics.add("", 3.0, {"policy_loss": 5.0, "reward": 2.0, "actor_grad_norm": 2.0})
    assert metrics.summary() == {"policy_loss": 4.0, "reward": 1.5, "actor_grad_norm": 2.0, "clip_factor": 0.75}


def test_the_clip_factor_is_a_mean_over_the_steps_that_were_taken():
    """Norms of 4 and 0.5 with a maximum of 1, and a refused step: (1/4 + 1) / 2, whatever tokens the steps have."""
    metrics = UpdateMetrics(flags())
    for tokens, norm in ((1.0, 4.0), (9.0, 0.5)):
        metrics.add("", tokens, {"actor_grad_norm": norm})
    metrics.add("", 5.0, {"actor_grad_norm": math.nan})
    assert metrics.summary()["clip_factor"] == 0.625
    assert clip_factor(4.0, 0.0) == clip_factor(0.0, 1.0) == 1.0  # no clipping, and no gradient
