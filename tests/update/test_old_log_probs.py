"""log π_old that nobody knows yet, and how a first pass fills it in."""

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf.update import old_log_probs

NAN = torch.nan


def test_unknown_log_probs_are_nan():
    found = old_log_probs.unknown(torch.ones(2, 3))
    assert found.shape == (2, 3) and found.isnan().all()


def test_taken_from_a_first_forward():
    """A response whose log-probs the forward gives, with a gap as agents have; an idle one, known before."""
    log_probs = torch.tensor([[-1.0, 0.0, -3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    selected = torch.tensor([[1, 0, 1], [0, 0, 0]])
    response = torch.tensor([[1, 0, 1], [1, 1, 0]])
    before = torch.tensor([[NAN, NAN, NAN], [-4.0, -5.0, NAN]])
    found = old_log_probs.taken_from(log_probs, selected, before, response)
    assert found.tolist() == [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]]
    assert not found.requires_grad


def test_store_gives_each_sample_its_row_without_padding():
    samples = [Experience(action_mask=torch.ones(n, dtype=torch.long)) for n in (3, 1)]
    old_log_probs.store(samples, torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]))
    assert [sample.action_log_probs.tolist() for sample in samples] == [[-1.0, -2.0, -3.0], [-4.0]]
