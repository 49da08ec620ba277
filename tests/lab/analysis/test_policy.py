"""The policy's gradients equal autograd's, its step is AdamW's without momentum, and its updates are undone."""

import copy

import pytest
import torch
from arlopti_testing.analysis_fakes import flat

from arlopti_openrlhf.lab.analysis import figures
from arlopti_openrlhf.lab.analysis.policy import MINI_BATCHES, micro_batches
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.token_update import low_probability_mask


def test_statistics_of_the_tokens(policy, batch, tokens):
    logits = policy.model(batch.sequences, attention_mask=batch.attention_mask).logits[:, :-1].detach() / 0.7
    log_probs, mask = logits.log_softmax(dim=-1), batch.action_mask
    sampled = log_probs.gather(-1, batch.sequences[:, 1:, None])[..., 0]
    assert torch.allclose(tokens.log_probs, sampled * mask, atol=2e-5)
    assert torch.allclose(policy.log_probs(batch), tokens.log_probs, atol=2e-5)  # by the training's actor
    rest = log_probs.exp().square().sum(dim=-1) - sampled.exp().square()
    assert torch.allclose(tokens.squared_rest, rest * mask, atol=1e-5)
    assert torch.allclose(tokens.entropy, torch.distributions.Categorical(logits=logits).entropy() * mask, atol=1e-4)


def test_gradients_of_groups_add_up_to_the_whole(policy, batch, tokens):
    quarters = figures.bins(tokens.log_probs.exp(), batch.action_mask, figures.EDGES)
    assert torch.equal(torch.stack(quarters).sum(dim=0), batch.action_mask.long())
    whole = flat(policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask))
    parts = sum(flat(policy.gradient(batch, tokens.log_probs, batch.advantages, q)) for q in quarters)
    assert whole.norm() > 0.01 and torch.allclose(parts, whole, atol=1e-6)
    # By hand: on-policy, the gradient is that of -Σ A log π / number of response tokens.
    loss = -(batch.advantages * policy.actor(batch.sequences, batch.action_mask, batch.attention_mask)).sum()
    direct = torch.autograd.grad(loss / batch.action_mask.sum(), policy.parameters)
    assert torch.allclose(whole, flat(direct), atol=1e-6)


def test_second_moments_are_those_of_mini_batches(policy, batch, tokens):
    moments = policy.zeros()
    policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    squares = 0
    for prompts in batch.prompts.unique().chunk(MINI_BATCHES):
        rows = torch.isin(batch.prompts, prompts)
        part = Batch(**{name: value[rows] for name, value in vars(batch).items()})
        own = flat(policy.gradient(part, tokens.log_probs[rows], part.advantages, part.action_mask))
        squares = squares + own.square() / MINI_BATCHES  # divided by its own tokens, which are equally many
    assert torch.allclose(flat(moments), squares, rtol=1e-3, atol=1e-9)


def test_step_is_adamws_in_a_running_training_without_momentum(policy):
    generator = torch.Generator().manual_seed(0)
    gradient = [1e-2 * torch.randn(p.shape, generator=generator) for p in policy.parameters]
    moments = [1e-4 * (0.1 + torch.rand(p.shape, generator=generator)) for p in policy.parameters]
    copies = [copy.deepcopy(p) for p in policy.parameters]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, betas=(0.0, 1 - 1e-9), weight_decay=0)
    for p, g, v in zip(copies, gradient, moments, strict=True):
        p.grad = g
        # After so many steps that the bias correction is over.
        optimizer.state[p] = {"step": torch.tensor(1e12), "exp_avg": torch.zeros_like(p), "exp_avg_sq": v.clone()}
    optimizer.step()
    policy.step(gradient, moments, 1e-3)
    stepped = flat(policy.parameters).detach()
    policy.restore()
    assert torch.allclose(stepped, flat(copies).detach(), atol=1e-6)
    assert torch.equal(flat(policy.parameters), flat(policy.start)) and not torch.equal(stepped, flat(policy.start))


def test_an_update_is_undone_and_lopti_takes_two_steps(policy, batch, tokens):
    low = low_probability_mask(tokens.log_probs, batch.action_mask, 0.1)
    stages = [low, batch.action_mask & ~low]
    both = policy.log_probs_after_update(batch, tokens.log_probs, batch.advantages, stages, 1e-3)
    assert torch.equal(flat(policy.parameters), flat(policy.start))
    moments = [policy.zeros(), policy.zeros()]
    low, high = (
        policy.gradient(batch, tokens.log_probs, batch.advantages, *pair) for pair in zip(stages, moments, strict=True)
    )
    shared = [(a + b) / 2 for a, b in zip(*moments, strict=True)]
    policy.step(low, shared, 1e-3)
    second = policy.gradient(batch, tokens.log_probs, batch.advantages, stages[1])
    policy.step(second, shared, 1e-3)
    expected = policy.log_probs(batch)
    policy.restore()
    assert torch.allclose(both, expected, atol=1e-4)
    assert not torch.allclose(flat(second), flat(high), atol=1e-6)  # the second stage sees the moved weights


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_learning_rate_gives_the_change_that_is_asked_for(policy, batch, tokens, monkeypatch, optimizer):
    monkeypatch.setattr(policy, "optimizer", optimizer)
    moments = policy.zeros()
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    rate = policy.learning_rate_of(batch, tokens.log_probs, gradient, moments, 0.01)
    after = policy.log_probs_after_update(batch, tokens.log_probs, batch.advantages, [batch.action_mask], rate)
    change = (after - tokens.log_probs)[batch.action_mask]
    assert change.square().mean().sqrt().item() == pytest.approx(0.01, rel=0.1)
    # The objective rises.
    assert (change * batch.advantages[batch.action_mask]).sum() > 0


def test_a_prompt_counts_once_for_its_neighbours(batch):
    """Three responses to each of 8 prompts."""
    rows = torch.arange(len(batch.sequences))
    lengths, responses = batch.attention_mask.sum(dim=1), batch.action_mask.sum(dim=1)
    whole = int(lengths[0] + responses[1] + responses[2])
    pieces = list(micro_batches(batch, rows, whole))
    assert torch.equal(torch.cat(pieces), rows) and pieces[0].tolist() == [0, 1, 2]
    assert len(next(micro_batches(batch, rows, whole, shares=False))) < 3
    assert [len(piece) for piece in micro_batches(batch, rows, 1)] == [1] * len(rows)
    assert not list(micro_batches(batch, rows[:0], 1))
