"""log π_old that nobody knows yet, and how a first pass fills it in."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ray import ppo_actor

from arlopti_openrlhf import token_method
from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.sample import Sample
from arlopti_openrlhf.update.token_weights import TokenWeights
from arlopti_openrlhf.update.trainer import TokenUpdateTrainer


def actor(dropout: float = 0.0, **config) -> SimpleNamespace:
    modules = [torch.nn.Linear(1, 1), torch.nn.Dropout(dropout)]
    return SimpleNamespace(modules=lambda: modules, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2, **config}))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (actor(), False),
        (actor(dropout=0.1), True),
        (actor(attention_dropout=0.1), True),
        (actor(router_jitter_noise=0.01), True),
        (actor(attention_dropout=0.0, rope_theta=1e4), False),
    ],
)
def test_what_makes_a_forward_pass_random(policy, expected):
    assert old_log_probs.is_random(policy) is expected


@pytest.mark.parametrize(
    ("use_loss", "init_coef", "expected"), [(True, 0.1, False), (False, 0.0, False), (False, 0.1, True)]
)
def test_a_kl_in_the_reward(use_loss, init_coef, expected):
    args = SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(use_loss=use_loss, init_coef=init_coef)))
    assert old_log_probs.needed_before(args) is expected


def test_a_forks_experience_maker_may_read_them(monkeypatch):
    args = SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True, init_coef=0.1)))
    readers = tuple((name, "another") for name, _ in old_log_probs._READERS)
    monkeypatch.setattr(old_log_probs, "_READERS", readers)
    old_log_probs._readers_are_known.cache_clear()
    assert old_log_probs.needed_before(args)
    old_log_probs._readers_are_known.cache_clear()


def test_a_training_step_of_a_users_own_is_refused(monkeypatch):
    """The selective update calls none, so what it computes would be left out in silence."""

    class Own(TokenUpdateTrainer):
        settings = "those of the flags"

        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    kept = {"args": None, "actor": SimpleNamespace(is_vlm=False)}
    monkeypatch.setattr(ppo_actor.ActorPPOTrainer, "__init__", lambda self: vars(self).update(kept))
    with pytest.raises(ValueError, match=r"training_step is that of \S*test_old_log_probs, which OpenRLHF's own"):
        Own()


def test_unknown_log_probs_are_nan():
    found = old_log_probs.unknown(torch.ones(2, 3))
    assert found.shape == (2, 3) and found.isnan().all()


def test_store_gives_each_sample_its_row_without_padding():
    samples = [Sample(action_mask=torch.ones(n, dtype=torch.long)) for n in (3, 1)]
    old_log_probs.store(samples, torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]))
    assert [sample.action_log_probs.tolist() for sample in samples] == [[-1.0, -2.0, -3.0], [-4.0]]


def test_entropies_that_are_known_stay():
    """An idle response has been computed before the first pass, which leaves it out."""
    samples = [Sample(action_mask=torch.ones(n, dtype=torch.long)) for n in (2, 1)]
    samples[1].entropies = known = torch.ones(1)
    shown = torch.tensor([[1.0, 2.0], [9, 9]])
    old_log_probs.store(samples, torch.zeros(2, 2), shown)
    assert samples[0].entropies.tolist() == [1, 2] and samples[1].entropies is known


@pytest.mark.parametrize("reason", ["", "a random forward", "a KL in the reward", "experts in groups", "a statistic"])
def test_what_keeps_the_first_pass_from_giving_log_probs(reason, monkeypatch):
    monkeypatch.setattr(old_log_probs, "is_random", lambda actor: reason == "a random forward")
    monkeypatch.setattr(old_log_probs, "needed_before", lambda args: reason == "a KL in the reward")
    methods = token_method.load(["lopti"], ["lopti.quantile=0.5"] if reason == "a statistic" else [])
    weights = TokenWeights(methods, by_token=True)
    trainer = SimpleNamespace(token_weights=weights, aux_loss=reason == "experts in groups", args=None, actor=None)
    assert TokenUpdateTrainer.first_pass_gives_old_log_probs.func(trainer) == (not reason)
