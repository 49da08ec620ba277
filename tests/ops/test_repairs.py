"""Each repair of OpenRLHF can be left out, and then OpenRLHF's own behaviour is there."""

from types import SimpleNamespace

import pytest
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

from arlopti_openrlhf.ops import repairs
from arlopti_openrlhf.ops.checkpoints import saving
from arlopti_openrlhf.ops.health.guard import GuardedStrategy
from arlopti_openrlhf.ops.preflight import values
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker


def without(*names: str, ops: str = "on", **more) -> SimpleNamespace:
    return SimpleNamespace(ops=ops, without_repair=list(names), **more)


@pytest.mark.parametrize("name", repairs.REPAIRS)
def test_a_repair_is_made_unless_it_or_care_is_left_out(name):
    others = [other for other in repairs.REPAIRS if other != name]
    assert repairs.is_made(name, without(*others)) and not repairs.is_made(name, without(name))
    assert not repairs.is_made(name, without(ops="off"))


@pytest.fixture
def maker():
    """Return maker(repair), which returns an experience maker without it."""

    def of(*names: str):
        made = object.__new__(ExperienceMaker)
        made.args = without(*names, algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm")))
        return made

    return of


@pytest.mark.parametrize("left_out", [[], ["equal_rewards"]])
def test_equal_rewards(maker, monkeypatch, left_out):
    """With the repair OpenRLHF applies our length penalties, which set equal rewards to 0 after its own."""
    own, seen = upstream.apply_length_penalties, []

    def compute(self, experiences):
        seen.append(upstream.apply_length_penalties is own)
        return experiences

    monkeypatch.setattr(RemoteExperienceMaker, "compute_advantages_and_returns", compute)
    maker(*left_out).compute_advantages_and_returns([])
    assert seen == [bool(left_out)]


@pytest.mark.parametrize("left_out", [[], ["ema_zero3"]])
def test_ema_under_zero3(monkeypatch, left_out):
    strategy = object.__new__(GuardedStrategy)
    strategy.args, strategy.stage, strategy.accumulated_gradient, strategy.use_dynamic_batch = (
        without(*left_out),
        3,
        1,
        False,
    )
    strategy.time_steps = {"ema": 0}
    called: list = []
    monkeypatch.setattr(DeepspeedStrategy, "moving_average", lambda self, *args: called.append("upstream's"))
    monkeypatch.setattr(GuardedStrategy, "_average_shards", lambda self, *args: called.append("ours"))
    strategy.moving_average(SimpleNamespace(model=SimpleNamespace(optimizer=object())), None)
    assert called == ["upstream's" if left_out else "ours"]


@pytest.mark.parametrize("left_out", [[], ["learning_rate"]])
def test_learning_rate(monkeypatch, left_out):
    strategy = object.__new__(saving.CheckpointStrategy)
    strategy.args, seen = without(*left_out), []
    monkeypatch.setattr(GuardedStrategy, "_ds_init_train_model", lambda self, model, cfg: (model, None, "schedule"))
    monkeypatch.setattr(saving.learning_rate, "stay_at_minimum", lambda scheduler, cfg: seen.append(scheduler))
    strategy._ds_init_train_model(None, {})
    assert seen == ([] if left_out else ["schedule"])


@pytest.mark.parametrize("left_out", [[], ["lora"]])
def test_lora(left_out):
    args = without(*left_out, algo=SimpleNamespace(kl=SimpleNamespace(init_coef=0.1)))
    args.ds = SimpleNamespace(lora=SimpleNamespace(rank=4), load_in_4bit=False)
    assert values.loads_reference(args) == bool(left_out)
