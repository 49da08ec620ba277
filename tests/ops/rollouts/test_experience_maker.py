"""Equal rewards have no advantage, samples may have different metrics, and all else is upstream's, bit for bit."""

from types import SimpleNamespace

import pytest
import ray
import torch
from openrlhf.cli import train_ppo_ray as upstream
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.config import hierarchize

from arlopti_openrlhf import bindings
from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.ops import controller
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker, ReferenceInPolicy

GROUP, LENGTH = 8, 5
# Rewards of four prompts: 0.1 has no exact mean, the third group differs by one rounding, the last has an exact mean.
REWARDS = [[0.1] * 8, [0.1, 0.7] * 4, [0.1] * 7 + [0.1 + 1e-8], [3.0] * 8]


def make_args(estimator: str = "group_norm", *more: str) -> SimpleNamespace:
    sizes = f"--rollout.n_samples_per_prompt {GROUP} --rollout.micro_batch_size 4 --rollout.max_new_tokens {LENGTH}"
    flags = f"--actor.model_name_or_path m --algo.advantage.estimator {estimator} --algo.kl.init_coef 0.1 {sizes}"
    return hierarchize(parse([*flags.split(), *more]))


def advantages(kind: type, args: SimpleNamespace, rewards: list[list[float]], kl: bool = False) -> list[Experience]:
    """Return the experience that `kind` makes of these groups, in micro-batches of shuffled samples."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(rewards).flatten()
    experiences = []
    for index in torch.randperm(len(values), generator=generator).split(6):
        lengths = 2 + index % (LENGTH - 1)
        mask = torch.arange(LENGTH)[None] < lengths[:, None]
        experiences.append(
            Experience(
                index=index.tolist(),
                rewards=values[index],
                kl=torch.rand(len(index), LENGTH, generator=generator) * mask * kl,
                action_mask=mask,
                truncated=index < 12,
                info={},
            )
        )
    maker = kind(None, None, None, None, SimpleNamespace(value=0.1), SimpleNamespace(args=args), None)
    return maker.compute_advantages_and_returns(experiences)


def by_sample(experiences: list[Experience], name: str) -> torch.Tensor:
    index = torch.tensor([place for experience in experiences for place in experience.index])
    values = torch.cat([e.info[name] if name in e.info else getattr(e, name) for e in experiences])
    return values[index.argsort()]


@pytest.mark.parametrize("kl", [False, True])
def test_equal_rewards_have_no_advantage(kl):
    ours = advantages(ExperienceMaker, make_args(), REWARDS, kl)
    stock = advantages(RemoteExperienceMaker, make_args(), REWARDS, kl)
    # What remains is what stock gives to rewards of 0: nothing, or the penalty for the KL divergence.
    without = advantages(RemoteExperienceMaker, make_args(), [[0.0] * GROUP] * len(REWARDS), kl)
    for name in ("advantages", "returns", "return", "group_reward_std"):
        found, expected = by_sample(ours, name), by_sample(stock, name)
        assert torch.equal(found[:GROUP], by_sample(without, name)[:GROUP])
        assert torch.equal(found[GROUP:], expected[GROUP:])  # to the last bit
        assert found.dtype == expected.dtype
    if not kl:
        assert not by_sample(ours, "advantages")[:GROUP].any()
    assert by_sample(ours, "advantages")[2 * GROUP :].any()  # unequal by one rounding is unequal


def test_rewards_count_after_the_length_penalties():
    """The penalty makes the first prompt's rewards equal, and half of the second's, which were equal, different."""
    args = make_args("group_norm", "--reward.stop_properly_penalty_coef", "-0.1")
    rewards = [[float(i) for i in range(GROUP)], [0.1] * GROUP]
    ours, stock = (advantages(kind, args, rewards) for kind in (ExperienceMaker, RemoteExperienceMaker))
    assert by_sample(ours, "advantages")[GROUP:].any() and by_sample(stock, "advantages")[:GROUP].any()
    assert not by_sample(ours, "advantages")[:GROUP].any()
    assert torch.equal(by_sample(ours, "advantages")[GROUP:], by_sample(stock, "advantages")[GROUP:])
    assert torch.equal(by_sample(ours, "rewards"), by_sample(stock, "rewards"))


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "dr_grpo", "reinforce", "flash_reinforce"])
def test_other_estimators_are_upstreams_and_amplify_nothing(estimator):
    ours, stock = (
        advantages(kind, make_args(estimator), REWARDS) for kind in (ExperienceMaker, RemoteExperienceMaker)
    )
    assert torch.equal(by_sample(ours, "advantages"), by_sample(stock, "advantages"))
    # In a batch of nothing but equal rewards, whitening multiplies one rounding by 10,000 at most.
    equal = advantages(RemoteExperienceMaker, make_args(estimator), [[0.1] * GROUP] * 4)
    of_tokens = by_sample(equal, "advantages")[by_sample(equal, "action_mask")]
    assert of_tokens.abs().max() < 1e-3


def test_each_rank_gets_as_many_micro_batches():
    """20 prompts of the last rollout batch on 8 ranks: upstream's would get 3, and the last two 2 and 0."""
    args = make_args("group_norm", "--rollout.micro_batch_size", "8")
    group = lambda ranks: SimpleNamespace(_actor_handlers=[None] * ranks, duplicate_actors=1)  # noqa: E731
    maker = ExperienceMaker(
        group(8), group(4), None, "ref", None, SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    )
    for count, sizes in ((160, [6, 7, 7] * 8), (256, [8] * 32), (9, [1] * 7 + [2])):
        samples = [Experience(sequences=torch.tensor([[i]]), info={}) for i in range(count)]
        batches = maker.split_rollout_samples(samples)
        assert [len(batch.sequences) for batch in batches] == sizes
        assert torch.equal(torch.cat([batch.sequences for batch in batches]).flatten(), torch.arange(count))
        assert [place for batch in batches for place in batch.index] == list(range(count))


def test_a_response_without_tokens_has_no_kl(monkeypatch):
    """Upstream's mean is 0/0. What is not finite otherwise stays so."""

    def upstreams(self, samples_list):
        masks = torch.tensor([[1, 1], [0, 0], [1, 0]])
        return [
            Experience(action_mask=masks, info={name: torch.tensor([0.5, torch.nan, torch.nan]) for name in names})
        ]

    names = "kl", "logprobs_diff"
    monkeypatch.setattr(RemoteExperienceMaker, "make_experience", upstreams)
    (experience,) = object.__new__(ExperienceMaker).make_experience([])
    for name in names:
        assert torch.equal(experience.info[name][:2], torch.tensor([0.5, 0.0])) and experience.info[name][2].isnan()


def test_both_trainers_have_it():
    class Upstream(BasePPOTrainer):
        fit = None

        def __init__(self, pretrain, strategy, *groups) -> None:
            super().__init__(strategy, *groups)

    class Trainer(controller.Controller, Upstream):
        pass

    args = make_args()
    trainer = Trainer(
        "pretrain", SimpleNamespace(args=args), "actor", "critic", "reward", "reference", "engines", "tokenizer"
    )
    maker = trainer.experience_maker
    assert type(maker) is ExperienceMaker and maker.kl_ctl is trainer.kl_ctl and maker.args is args
    groups = maker.actor_model_group, maker.critic_model_group, maker.reward_model_group, maker.initial_model_group
    assert (*groups, maker.tokenizer) == ("actor", "critic", "reward", "reference", "tokenizer")
    for actor in (controller.PPOTrainer, controller.TrainingActor):
        assert issubclass(actor, controller.Controller)


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
    upstream.RayActorGroup = lambda *args, **kwargs: made.append((args, kwargs))
    bindings.put(row for row in bindings.TABLE if row.name == "RayActorGroup")
    assert upstream.RayActorGroup(1, 2, upstream.ReferenceModelActor, pg=None) is None and not made
    upstream.RayActorGroup(1, 2, upstream.PolicyModelActor, pg=None, num_gpus_per_actor=1)
    assert made == [((1, 2, upstream.PolicyModelActor), {"pg": None, "num_gpus_per_actor": 1})]


@pytest.mark.parametrize(
    "group, coefficient, expected", [(None, 0.1, ReferenceInPolicy), (None, 0.0, type(None)), ("group", 0.1, str)]
)
def test_the_policy_stands_in_where_a_reference_is_needed_and_there_is_none(group, coefficient, expected):
    kl, advantage = SimpleNamespace(init_coef=coefficient), SimpleNamespace(estimator="gae")
    args = SimpleNamespace(algo=SimpleNamespace(kl=kl, advantage=advantage))
    maker = ExperienceMaker(Policy(), None, None, group, None, SimpleNamespace(args=args), None)
    assert type(maker.initial_model_group) is expected
