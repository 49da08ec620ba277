"""The learning rate over twice the steps, past the end of its schedule, and after another plan."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import SchedulerType, get_scheduler

from arlopti_openrlhf.learning_rate import follow, stay_at_minimum, stretch


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


NEED_MORE_THAN_STEPS = ("reduce_lr_on_plateau", "greedy", "warmup_stable_decay")  # OpenRLHF can start none of them


def schedule(name: str, steps: int, warmup: int) -> LambdaLR:
    """Return the schedule as upstream's strategy makes it, with a minimum of 0.1 where it has one."""
    kwargs = {"min_lr_rate": 0.1} if "min_lr" in name else {}
    return get_scheduler(name, optimizer(), warmup, steps, kwargs)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("steps", "warmup"), [(16, 1), (16, 0), (1, 1)])
@pytest.mark.parametrize("name", sorted({kind.value for kind in SchedulerType} - set(NEED_MORE_THAN_STEPS)))
def test_past_its_end_a_schedule_does_not_rise(name, steps, warmup, stages):
    if name == "polynomial" and steps == warmup:
        pytest.skip("transformers divides by zero")
    ours, upstreams = schedule(name, steps, warmup), schedule(name, steps, warmup)
    stay_at_minimum(ours, {"lr_scheduler": name, "scheduler_steps": steps, "min_lr_ratio": 0.1})
    for scheduler in (ours, upstreams):
        stretch(scheduler, stages)
    until_end = stages * steps
    assert rates(ours, until_end) == rates(upstreams, until_end)  # to the last bit
    later = rates(ours, 4 * until_end)[until_end:]
    assert later == sorted(later, reverse=True)
    if "cosine" in name:
        assert set(later) == {0.1 if "min_lr" in name else 0.0}


def test_a_schedule_of_another_plan_is_followed_at_once():
    """Of 16 steps 8 were done, and the new plan has 6: its minimum is due now, and not only after the next step."""
    done = schedule("cosine_with_min_lr", 16, 0)
    for _ in range(8):
        done.optimizer.step()
        done.step()
    resumed = schedule("cosine_with_min_lr", 6, 0)
    stay_at_minimum(resumed, {"lr_scheduler": "cosine_with_min_lr", "scheduler_steps": 6, "min_lr_ratio": 0.1})
    resumed.optimizer.load_state_dict(done.optimizer.state_dict())
    resumed.load_state_dict(done.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    follow(resumed)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.1 and resumed.get_last_lr() == [0.1]
    stretch(resumed, 2)  # 8 of 12 are done: 0.1 + 0.9 * (1 + cos(2 pi / 3)) / 2
    assert resumed.get_last_lr() == [pytest.approx(0.325)]
