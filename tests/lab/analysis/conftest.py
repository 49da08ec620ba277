"""Provide a batch of graded responses, the policy that gave them, and its statistics of their tokens."""

import pytest
from arlopti_testing.analysis_fakes import RIGHT, WRONG, fake_answers

from arlopti_openrlhf.lab.analysis import rollouts
from arlopti_openrlhf.lab.analysis.policy import Policy
from arlopti_openrlhf.lab.scoring.inputs import read_rows


@pytest.fixture(scope="module")
def batch(tiny_model, tiny_data):
    """Return a batch of 8 prompts with 3 responses each, one of them right."""
    rows = rollouts.draw(read_rows([tiny_data]), 8, seed=0)
    sampled = fake_answers(tiny_model, rows, [RIGHT, WRONG, "no"])
    return rollouts.make_batch(rollouts.grade(rows, sampled))


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(tiny_model, temperature=0.7, micro_batch_tokens=600, optimizer="adamw")


@pytest.fixture(scope="module")
def tokens(policy, batch):
    return policy.tokens(batch)
