"""The learning rate over twice the steps."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from arlopti_openrlhf.update.optimizer_steps import stretch


def rates(scheduler: LambdaLR, steps: int) -> list[float]:
    return [scheduler.lr_lambdas[0](step) for step in range(steps)]


def test_a_schedule_is_stretched_once():
    """Trainers that follow one another on one schedule, with two stages, with two again, with one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / 10)
    once = rates(scheduler, 4)
    for _ in range(2):
        stretch(scheduler, 2)
        assert rates(scheduler, 8)[::2] == once
    stretch(scheduler, 1)
    assert rates(scheduler, 4) == once
