"""log π_old that nobody knows yet, and how a first pass fills it in."""

from types import SimpleNamespace

import pytest
import torch

from arlopti_openrlhf.update import old_log_probs
from arlopti_openrlhf.update.sample import Sample


def actor(dropout: float = 0.0, **config) -> SimpleNamespace:
    modules = [torch.nn.Linear(1, 1), torch.nn.Dropout(dropout)]
    return SimpleNamespace(modules=lambda: modules, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2, **config}))


def flags(use_loss: bool = True, init_coef: float = 0.1) -> SimpleNamespace:
    return SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(use_loss=use_loss, init_coef=init_coef)))


@pytest.mark.parametrize(
    ("args", "policy", "balances", "expected"),
    [
        (flags(), actor(), False, True),
        (flags(use_loss=False, init_coef=0.0), actor(), False, True),
        (flags(use_loss=False), actor(), False, False),  # the KL is in the reward
        (flags(), actor(), True, False),  # an empty group would have the balancing loss's gradient
        (flags(), actor(dropout=0.1), False, False),
        (flags(), actor(attention_dropout=0.1), False, False),
        (flags(), actor(router_jitter_noise=0.01), False, False),
        (flags(), actor(attention_dropout=0.0, rope_theta=1e4), False, True),
    ],
)
def test_what_allows_to_defer(args, policy, balances, expected):
    assert old_log_probs.can_defer(args, policy, balances) is expected


def test_unknown_log_probs_are_nan():
    found = old_log_probs.unknown(torch.ones(2, 3))
    assert found.shape == (2, 3) and found.isnan().all()


def test_store_gives_each_sample_its_row_without_padding():
    samples = [Sample(action_mask=torch.ones(n, dtype=torch.long)) for n in (3, 1)]
    old_log_probs.store(samples, torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]))
    assert [sample.action_log_probs.tolist() for sample in samples] == [[-1.0, -2.0, -3.0], [-4.0]]


def test_distributions_that_are_known_stay():
    """An idle response has been computed before the first pass, which leaves it out."""
    samples = [Sample(action_mask=torch.ones(n, dtype=torch.long)) for n in (2, 1)]
    samples[1].distributions = known = torch.ones(2, 1)
    shown = torch.tensor([[1.0, 2.0], [9, 9]]), torch.tensor([[3.0, 4], [9, 9]])
    old_log_probs.store(samples, torch.zeros(2, 2), shown)
    assert samples[0].distributions.tolist() == [[1, 2], [3, 4]] and samples[1].distributions is known
