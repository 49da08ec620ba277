"""A LoRA run's reference: no actors of its own, and the experience maker's calls go to the policy's."""

from types import SimpleNamespace

import pytest
import ray
from openrlhf.cli import train_ppo_ray as upstream
from openrlhf.trainer.ray import launcher

from arlopti_openrlhf.ops.controller import Controller
from arlopti_openrlhf.ops.rollouts import lora_reference
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker
from arlopti_openrlhf.ops.rollouts.lora_reference import ReferenceInPolicy


class Policy:
    """Stands for the group of policy actors, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def async_run_method_batch(self, method_name, **kwargs):
        self.asked.append((method_name, kwargs))
        return ["result"]

    def async_run_method(self, method_name):
        self.asked.append((method_name, {}))
        return [None]


@pytest.mark.parametrize("is_colocated", [False, True])
def test_the_experience_makers_calls_go_to_the_policy(is_colocated, monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    policy = Policy()
    samples = {"sequences": [1], "action_mask": [2]}
    assert ExperienceMaker._dispatch_forward(None, ReferenceInPolicy(policy), is_colocated, **samples) == ["result"]
    assert policy.asked == [("forward_reference", samples), ("empty_cache", {})][: 1 + is_colocated]


def test_upstream_starts_no_reference_and_all_other_groups(monkeypatch):
    made = []
    monkeypatch.setattr(upstream, "RayActorGroup", upstream.RayActorGroup)
    monkeypatch.setattr(launcher, "RayActorGroup", lambda *args, **kwargs: made.append((args, kwargs)))
    lora_reference.install(upstream)
    assert upstream.RayActorGroup(1, 2, upstream.ReferenceModelActor, pg=None) is None and not made
    upstream.RayActorGroup(1, 2, upstream.PolicyModelActor, pg=None, num_gpus_per_actor=1)
    assert made == [((1, 2, upstream.PolicyModelActor), {"pg": None, "num_gpus_per_actor": 1})]


@pytest.mark.parametrize(
    "group, coefficient, expected", [(None, 0.1, ReferenceInPolicy), (None, 0.0, type(None)), ("group", 0.1, str)]
)
def test_the_policy_stands_in_where_a_reference_is_needed_and_there_is_none(group, coefficient, expected):
    args = SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(init_coef=coefficient)))
    controller = SimpleNamespace(args=args, actor_model_group=Policy(), reference_model_group=group)
    assert type(Controller._reference(controller)) is expected
