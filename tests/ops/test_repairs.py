"""Each repair of OpenRLHF can be left out, and then OpenRLHF's own behaviour is there."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.datasets import prompts_dataset
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

from arlopti_openrlhf.ops import repairs
from arlopti_openrlhf.ops.checkpoints import saving
from arlopti_openrlhf.ops.health.guard import GuardedStrategy
from arlopti_openrlhf.ops.preflight import values
from arlopti_openrlhf.ops.rollouts import prompts
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker


def without(*names: str, ops: str = "on", **more) -> SimpleNamespace:
    return SimpleNamespace(ops=ops, without_repair=list(names), **more)


@pytest.mark.parametrize("name", repairs.REPAIRS)
def test_a_repair_is_made_unless_it_or_care_is_left_out(name):
    others = [other for other in repairs.REPAIRS if other != name]
    assert repairs.is_made(name, without(*others)) and not repairs.is_made(name, without(name))
    assert not repairs.is_made(name, without(ops="off"))


@pytest.fixture
def maker(monkeypatch):
    """Return maker(repair), which returns an experience maker without it."""
    for name in ("split_rollout_samples", "compute_advantages_and_returns"):
        monkeypatch.setattr(RemoteExperienceMaker, name, lambda self, given: "upstream's")

    def of(*names: str):
        made = object.__new__(ExperienceMaker)
        made.args = without(*names, algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm")))
        return made

    return of


def test_extra_logs(maker):
    """With the repair the second sample gets the metric, without it OpenRLHF gets the samples as they are."""
    for left_out in (["extra_logs"], []):
        samples = [Experience(info={"length": torch.ones(1)}), Experience(info={})]
        made = maker(*left_out)
        made._incomplete = set()
        assert made.split_rollout_samples(samples) == "upstream's"
        assert ("length" in samples[1].info) == (not left_out)


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


@pytest.mark.parametrize("left_out", [[], ["image_text"]])
def test_image_text(monkeypatch, left_out):
    divide = prompts_dataset._str_to_content_list
    seen: list = []

    def datasets(strategy, tokenizer):
        seen.append(prompts_dataset._str_to_content_list)
        return [], None, 0

    monkeypatch.setattr(prompts, "_upstream_datasets", datasets)
    sizes = {"rollout": SimpleNamespace(n_samples_per_prompt=1), "train": SimpleNamespace(batch_size=1)}
    with pytest.raises(ValueError, match="nothing would be trained"):
        prompts.prepare_datasets(SimpleNamespace(args=without(*left_out, **sizes)), object())
    assert (seen[0] is divide) == bool(left_out)


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


def test_vision_processor(monkeypatch, tmp_path):
    strategy = object.__new__(saving.CheckpointStrategy)
    copied: list = []
    for name, function in {"_require_finite": lambda engine: None, "engine_of": lambda model: None}.items():
        monkeypatch.setattr(saving, name, function)
    for name in ("on_rank_0", "everywhere"):
        monkeypatch.setattr(saving, name, lambda function: function())
    monkeypatch.setattr(GuardedStrategy, "save_model", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(GuardedStrategy, "is_rank_0", lambda self: True)
    monkeypatch.setattr(saving, "_copy_processor", lambda model, writing: copied.append(model))
    for left_out in (["vision_processor"], []):
        strategy.args = without(*left_out, actor=SimpleNamespace(model_name_or_path="m"))
        strategy.save_model(None, None, str(tmp_path / str(len(left_out))))
        assert copied == ([] if left_out else ["m"])
