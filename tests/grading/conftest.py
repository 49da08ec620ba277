"""Math is compared without haste."""

import pytest

from arlopti_openrlhf.grading import math_reward
from arlopti_openrlhf.grading.runner import WorkerPool


@pytest.fixture(scope="session")
def patient_pool():
    pool = WorkerPool("arlopti_openrlhf.grading.math_compare:compare", math_reward.WORKERS, timeout=60, memory_gib=1.0)
    yield pool
    pool.close()


@pytest.fixture
def patient(patient_pool, monkeypatch):
    """The limit is far away. A machine that is busy may hold a comparison up for 2 s."""
    monkeypatch.setattr(math_reward, "_pool", patient_pool)
