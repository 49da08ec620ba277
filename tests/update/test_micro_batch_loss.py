"""The loss of a micro-batch, and of the tokens that a pass updates, by hand."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.loss import Objective, micro_batch_loss, pass_policy_loss
from arlopti_openrlhf.update.sample import MicroBatch, PassWeights

NAN = torch.nan
DENOMINATORS = {"batch_num_tokens": 5.0, "global_batch_size": 2.0}

RESPONSE = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = torch.full((2, 3), -1.0)


def micro_batch(**fields) -> MicroBatch:
    return MicroBatch(samples=(), weights=None, layout=None, plan=None, denominators=DENOMINATORS, share=1.0, **fields)


def pass_weights(factors: torch.Tensor, updated: torch.Tensor) -> PassWeights:
    return PassWeights(factors, updated, updated.flatten().nonzero()[:, 0])


def policy_loss(
    loss: PolicyLoss, log_probs, advantages, *, updated, selected, response=RESPONSE, rollout_log_probs=None
):
    """Upstream's loss of a pass whose weights are one."""
    batch = micro_batch(
        action_mask=response,
        action_log_probs=OLD,
        advantages=advantages,
        rollout_log_probs=rollout_log_probs,
        selected=selected,
    )
    return pass_policy_loss(loss, batch, pass_weights(torch.ones(2, 3), updated), log_probs)


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


RESTATED = {
    "token-mean": {},
    "seq-mean-token-mean": {"token_level_loss": False},
    "dual clip": {"dual_clip": 3.0},
    "gspo": {"policy_loss_type": "gspo"},
    "token importance sampling": {"is_correction_level": "token", "is_correction_threshold": (0.9, 1.1)},
    "sequence importance sampling": {"is_correction_level": "seq", "is_correction_threshold": (0.97, 1.03)},
}


@pytest.mark.parametrize("loss", RESTATED)
@pytest.mark.parametrize(
    ("init_coef", "estimator", "is_unbiased"), [(0.1, "k3", False), (0.1, "k1", True), (0.0, "k3", False)]
)
@pytest.mark.parametrize("entropy_coef", [None, 0.0, 0.05])
def test_with_weights_of_one_it_is_upstreams_loss_bit_for_bit(loss, init_coef, estimator, is_unbiased, entropy_coef):
    """Upstream's `training_step` on an actor that gives these log-probs: loss, gradient and what it logs."""
    generator = torch.Generator().manual_seed(0)
    old, reference, rollout, entropies = (-torch.rand(2, 3, generator=generator) for _ in range(4))
    new = old + 0.3 * torch.randn(2, 3, generator=generator)
    rows = dict(
        action_mask=RESPONSE,
        action_log_probs=old,
        base_action_log_probs=reference,
        rollout_log_probs=rollout,
        advantages=torch.randn(2, 3, generator=generator),
    )
    kl = SimpleNamespace(use_loss=True, init_coef=init_coef, estimator=estimator, unbiased_gradient=is_unbiased)
    policy = PolicyLoss(0.2, 0.24, **RESTATED[loss])
    args = SimpleNamespace(
        algo=SimpleNamespace(kl=kl),
        actor=SimpleNamespace(entropy_coef=entropy_coef, aux_loss_coef=0.5, policy_loss_type=policy.policy_loss_type),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    log_probs, entropy = new.requires_grad_(), (-entropies).requires_grad_()
    output = SimpleNamespace(entropy=entropy, aux_loss=torch.tensor(2.0))
    upstreams, theirs = upstreams_loss(log_probs, output, policy, args, rows)
    batch, weights = micro_batch(selected=RESPONSE, **rows), pass_weights(torch.ones(2, 3), RESPONSE)
    result = micro_batch_loss(batch, weights, log_probs, output, Objective(policy, args, 0.1, 0.5))
    assert torch.equal(result.loss, upstreams)
    gradients = (torch.autograd.grad(x, [log_probs, entropy], allow_unused=True) for x in (result.loss, upstreams))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    own = {name: value for name, value in result.logged.items() if value is not None}
    assert all(torch.equal(value, torch.as_tensor(theirs[name])) for name, value in own.items())


def upstreams_loss(log_probs, output, policy: PolicyLoss, args, rows: dict) -> tuple[torch.Tensor, dict]:
    """Return the loss of upstream's `training_step`, and what it logs, on an actor that gives these log-probs."""
    losses = []

    class Policy:
        def train(self):
            pass

        def __call__(self, *given, **named):
            return log_probs, output

    strategy = SimpleNamespace(
        ring_attn_group=None,
        backward=lambda loss, *rest: losses.append(loss),
        optimizer_step=lambda *given, **named: None,
        get_grad_norm=lambda actor: 0.0,
    )
    trainer = SimpleNamespace(
        args=args,
        actor=Policy(),
        actor_loss_fn=policy,
        aux_loss=True,
        ema_model=None,
        actor_optim=None,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
        strategy=strategy,
    )
    experience = Experience(sequences=torch.zeros(2, 4), **rows)
    status = ActorPPOTrainer.training_step(trainer, experience, 0.1, 0, DENOMINATORS)
    return losses[0], status["metrics"]


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
    batch = micro_batch(
        action_mask=response,
        action_log_probs=torch.tensor([[NAN, NAN, NAN], [-4.0, -5.0, NAN]]),
        advantages=torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
        selected=response * ~idle[:, None],
    )
    batch.action_log_probs = old_log_probs.given_by(log_probs, batch)
    assert batch.action_log_probs.tolist() == [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]]
    assert not batch.action_log_probs.requires_grad
    args = SimpleNamespace(
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        actor=SimpleNamespace(policy_loss_type="ppo", entropy_coef=None),
    )
    weights = pass_weights(torch.full((2, 3), 0.5), torch.tensor([[1, 0, 0], [1, 1, 0]]))
    objective = Objective(PolicyLoss(0.2, 0.24), args, kl_ctl=0.0, aux_loss_coef=0.0)
    loss = micro_batch_loss(batch, weights, log_probs, {}, objective).loss
    loss.backward()
    # One token of advantage 2 and weight 1/2, over five tokens.
    assert loss.item() == pytest.approx(-0.2) and log_probs.grad.tolist() == [[pytest.approx(-0.2), 0, 0], [0] * 3]
