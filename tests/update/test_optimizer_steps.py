"""The learning rate over twice the steps."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from arlopti_openrlhf.update.optimizer_steps import stretch


def rates(scheduler: LambdaLR, steps: int) -> list[float]:
    return [scheduler.lr_lambdas[0](step) for step in range(steps)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_a_schedule_is_stretched_once():
    """Trainers that follow one another on one schedule, with two stages, with two again, with one."""
    scheduler = LambdaLR(optimizer(), lambda step: 1.0 - step / 10)
    once = rates(scheduler, 4)
    for _ in range(2):
        stretch(scheduler, 2)
        assert rates(scheduler, 8)[::2] == once
    stretch(scheduler, 1)
    assert rates(scheduler, 4) == once


def test_a_checkpoint_of_the_schedule_holds_no_curve():
    """PyTorch would pickle the attributes of a callable object, and restore them onto the next run's curve."""
    scheduler = LambdaLR(optimizer(), lambda step: 1.0 - step / 10)
    stretch(scheduler, 2)
    assert scheduler.state_dict()["lr_lambdas"] == [None]


def test_a_schedule_that_does_not_count_steps():
    """Without Lopti it is left alone; its stages cannot share it."""
    scheduler = ReduceLROnPlateau(optimizer())
    stretch(scheduler, 1)
    with pytest.raises(ValueError, match="--actor.lr_scheduler: ReduceLROnPlateau"):
        stretch(scheduler, 2)
