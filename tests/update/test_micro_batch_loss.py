"""The loss of a micro-batch, and of the tokens that a pass updates, by hand."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import PolicyLoss

from arlopti_openrlhf.update.sample import MicroBatch, PassWeights, Sample
from arlopti_openrlhf.update.step import StepTrainer, pass_policy_loss

NAN = torch.nan
DENOMINATORS = {"batch_num_tokens": 5.0, "global_batch_size": 2.0}

RESPONSE = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = torch.full((2, 3), -1.0)


def policy_loss(
    loss: PolicyLoss, log_probs, advantages, *, updated, selected, response=RESPONSE, rollout_log_probs=None
):
    """Upstream's loss of a pass whose weights are one."""
    weights = PassWeights.of(torch.ones(2, 3), updated)
    batch = MicroBatch(
        action_mask=response,
        action_log_probs=OLD,
        advantages=advantages,
        rollout_log_probs=rollout_log_probs,
        weights=weights,
        selected=selected,
        denominators=DENOMINATORS,
        share=1.0,
    )
    return pass_policy_loss(loss, batch, weights, log_probs)


@pytest.mark.parametrize("token_mean", [True, False])
def test_by_hand(token_mean):
    """Two responses of 3 and 2 tokens, ratios 1, 2, 1/2 | 1, 2: value, clip ratio and ppo_kl of three tokens only."""
    updated = torch.tensor([[1, 1, 0], [0, 1, 0]])
    log_ratio = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 1.0]]).log()
    advantages = torch.tensor([[1.0, 3.0, 1.0], [1.0, -1.0, 5.0]])
    # The actor gives 0 where it computes nothing.
    log_probs = (OLD + log_ratio) * updated
    loss, logged = policy_loss(
        PolicyLoss(0.2, 0.24, token_level_loss=token_mean), log_probs, advantages, updated=updated, selected=updated
    )
    # -1·1, clipped -1.24·3, and -(2·-1) = 2, over all 5 tokens or over each response's 3 and 2.
    expected = (-1 - 3.72 + 2) / 5 if token_mean else ((-1 - 3.72) / 3 + 2 / 2) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert logged["ppo_clip_ratio"].item() == pytest.approx(1 / 3)
    log2 = log_ratio[0, 1].item()
    assert logged["ppo_kl"].item() == pytest.approx(-2 * log2 / 3, rel=1e-6)


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
def test_an_idle_response_counts_as_unmoved(loss_type):
    """The second response is not computed: it has no gradient, and the means are over both."""
    log_probs = torch.tensor([[-1.0, -0.5, -1.5], [0.0, 0.0, 0.0]], requires_grad=True)
    loss, logged = policy_loss(
        PolicyLoss(0.2, 0.24, policy_loss_type=loss_type),
        log_probs,
        torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        updated=RESPONSE,
        selected=torch.tensor([[1, 1, 1], [0, 0, 0]]),
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
        loss, _ = policy_loss(
            PolicyLoss(0.2, 0.24, policy_loss_type="gspo"), new, advantages, updated=group, selected=RESPONSE
        )
        return loss.item(), torch.autograd.grad(loss, new)[0]

    low = torch.tensor([[1, 0, 0], [0, 1, 0]])
    values, gradients = zip(*map(gradient, (low, RESPONSE - low, RESPONSE)), strict=True)
    assert values == pytest.approx([values[2]] * 3)
    assert torch.equal(gradients[0] + gradients[1], gradients[2])
    assert gradients[0][low == 0].abs().sum() == 0 < gradients[0].abs().sum()


def test_means_over_no_tokens_are_zero():
    nothing = torch.zeros(2, 3, dtype=torch.long)
    _, logged = policy_loss(
        PolicyLoss(0.2, 0.24, is_correction_level="seq"),
        torch.zeros(2, 3),
        torch.ones(2, 3),
        updated=nothing,
        selected=nothing,
        response=nothing,
        rollout_log_probs=OLD,
    )
    assert [float(term) for term in logged.values()] == [0, 0, 0, 0, 0]


def test_a_first_forward_gives_what_is_not_known_of_old_log_probs():
    """A response whose log-probs the forward gives, with a gap as agents have; an idle one, known before."""
    response, idle = torch.tensor([[1, 0, 1], [1, 1, 0]]), torch.tensor([False, True])
    log_probs = torch.tensor([[-1.0, 0.0, -3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    batch = MicroBatch(
        action_mask=response,
        action_log_probs=torch.tensor([[NAN, NAN, NAN], [-4.0, -5.0, NAN]]),
        advantages=torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
        weights=None,
        selected=response * ~idle[:, None],
        denominators=DENOMINATORS,
        share=1.0,
        gives_old_log_probs=True,
        samples=[Sample(action_mask=row) for row in response],
    )
    factors, updated = torch.full((2, 3), 0.5), torch.tensor([[1, 0, 0], [1, 1, 0]])
    losses = []
    args = SimpleNamespace(
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        actor=SimpleNamespace(policy_loss_type="ppo", entropy_coef=None),
    )
    trainer = SimpleNamespace(
        args=args,
        actor_loss_fn=PolicyLoss(0.2, 0.24),
        aux_loss_coef=None,
        statistics=None,
        actor=None,
        actor_optim=None,
        strategy=SimpleNamespace(backward=lambda loss, *rest: losses.append(loss)),
        _forward=lambda batch: (log_probs, {}),
        _weigh=lambda batch, output: PassWeights.of(factors, updated),
    )
    status = StepTrainer.training_step(trainer, batch, 0.0, 0)
    assert batch.action_log_probs.tolist() == [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]]
    assert not batch.action_log_probs.requires_grad and status["num_action_tokens"] == 3
    # One token of advantage 2 and weight 1/2, over five tokens.
    (loss,) = losses
    loss.backward()
    assert loss.item() == pytest.approx(-0.2) and log_probs.grad.tolist() == [[pytest.approx(-0.2), 0, 0], [0] * 3]
