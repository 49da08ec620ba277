"""The loss of a micro-batch, and of a group of its tokens, by hand."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import PolicyLoss

from arlopti_openrlhf.update.step import (
    MicroBatch,
    Objective,
    Weighed,
    group_policy_loss,
    micro_batch_loss,
    selection,
)

NAN = torch.nan
DENOMINATORS = {"batch_num_tokens": 5.0, "global_batch_size": 2.0}

RESPONSE = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = torch.full((2, 3), -1.0)


@pytest.mark.parametrize("token_mean", [True, False])
def test_by_hand(token_mean):
    """Two responses of 3 and 2 tokens, ratios 1, 2, 1/2 | 1, 2: value, clip ratio and ppo_kl of the group alone."""
    group = torch.tensor([[1, 1, 0], [0, 1, 0]])
    log_ratio = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 1.0]]).log()
    advantages = torch.tensor([[1.0, 3.0, 1.0], [1.0, -1.0, 5.0]])
    # The actor gives 0 outside the group.
    loss, logged = group_policy_loss(
        PolicyLoss(0.2, 0.24, token_level_loss=token_mean),
        (OLD + log_ratio) * group,
        OLD,
        advantages,
        group=group,
        selected=group,
        response=RESPONSE,
        rollout_log_probs=None,
        loss_batch_info=DENOMINATORS,
    )
    # Of the group: -1·1, clipped -1.24·3, and -(2·-1) = 2, over all 5 tokens or over each response's 3 and 2.
    expected = (-1 - 3.72 + 2) / 5 if token_mean else ((-1 - 3.72) / 3 + 2 / 2) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert logged["ppo_clip_ratio"].item() == pytest.approx(1 / 3)
    log2 = log_ratio[0, 1].item()
    assert logged["ppo_kl"].item() == pytest.approx(-2 * log2 / 3, rel=1e-6)


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
def test_an_idle_response_counts_as_unmoved(loss_type):
    """The second response is not computed: it has no gradient, and the means are over both."""
    log_probs = torch.tensor([[-1.0, -0.5, -1.5], [0.0, 0.0, 0.0]], requires_grad=True)
    loss, logged = group_policy_loss(
        PolicyLoss(0.2, 0.24, policy_loss_type=loss_type),
        log_probs,
        OLD,
        torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        group=RESPONSE,
        selected=torch.tensor([[1, 1, 1], [0, 0, 0]]),
        response=RESPONSE,
        rollout_log_probs=None,
        loss_batch_info=DENOMINATORS,
    )
    loss.backward()
    assert log_probs.grad[1].tolist() == [0, 0, 0] and log_probs.grad[0].abs().sum() > 0
    # -(0 + 0.5 - 0.5) over 5 tokens.
    assert logged["ppo_kl"].item() == pytest.approx(0.0, abs=1e-7)


def test_gspo_holds_the_rest_of_the_sequence_constant():
    """Both groups have the loss of the sequence, and a part of its gradient each."""
    torch.manual_seed(0)
    new = (OLD + 0.1 * torch.randn(2, 3)).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])

    def gradient(group):
        loss, _ = group_policy_loss(
            PolicyLoss(0.2, 0.24, policy_loss_type="gspo"),
            new,
            OLD,
            advantages,
            group=group,
            selected=RESPONSE,
            response=RESPONSE,
            rollout_log_probs=None,
            loss_batch_info=DENOMINATORS,
        )
        return loss.item(), torch.autograd.grad(loss, new)[0]

    low = torch.tensor([[1, 0, 0], [0, 1, 0]])
    values, gradients = zip(*map(gradient, (low, RESPONSE - low, RESPONSE)), strict=True)
    assert values == pytest.approx([values[2]] * 3)
    assert torch.equal(gradients[0] + gradients[1], gradients[2])
    assert gradients[0][low == 0].abs().sum() == 0 < gradients[0].abs().sum()


def test_means_over_no_tokens_are_zero():
    nothing = torch.zeros(2, 3, dtype=torch.long)
    _, logged = group_policy_loss(
        PolicyLoss(0.2, 0.24, is_correction_level="seq"),
        torch.zeros(2, 3),
        OLD,
        torch.ones(2, 3),
        group=nothing,
        selected=nothing,
        response=nothing,
        rollout_log_probs=OLD,
        loss_batch_info=DENOMINATORS,
    )
    assert [float(term) for term in logged.values()] == [0, 0, 0, 0, 0]


def test_a_first_forward_gives_what_is_not_known_of_old_log_probs():
    """A response whose log-probs the forward gives, with a gap as agents have; an idle one, known before."""
    response = torch.tensor([[1, 0, 1], [1, 1, 0]])
    experience = SimpleNamespace(
        action_mask=response,
        action_log_probs=torch.tensor([[NAN, NAN, NAN], [-4.0, -5.0, NAN]]),
        advantages=torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
        rollout_log_probs=None,
    )
    log_probs = torch.tensor([[-1.0, 0.0, -3.0], [0.0, 0.0, 0.0]], requires_grad=True)

    def weigh(old, output):
        assert not old.requires_grad
        return Weighed.of(torch.full((2, 3), 0.5), torch.tensor([[1, 0, 0], [1, 1, 0]]))

    args = SimpleNamespace(
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        actor=SimpleNamespace(policy_loss_type="ppo", entropy_coef=None),
    )
    selected = selection(response, response, torch.tensor([False, True]), "ppo")
    assert selected.tolist() == [[1, 0, 1], [0, 0, 0]]
    batch = MicroBatch(experience, Weighed.of(response, response), selected, None, True, DENOMINATORS, 1.0)
    objective = Objective(PolicyLoss(0.2, 0.24), args, 0.0, None)
    result = micro_batch_loss(lambda batch: (log_probs, {}), objective, batch, weigh)
    assert result.old_log_probs.tolist() == [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]]
    assert result.weighed.group.tolist() == [[1, 0, 0], [1, 1, 0]]
    # One token of advantage 2 and weight 1/2, over five tokens.
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.2) and log_probs.grad.tolist() == [
        [pytest.approx(-0.2), 0, 0],
        [0] * 3,
    ]
