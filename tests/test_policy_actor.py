"""The update through real Ray workers: two ranks, DeepSpeed ZeRO-2 and ZeRO-3, upstream's actor and trainer.

The workers train in float32 where gradients are compared. Learning rate 0 keeps θ where it is while optimizer steps
are taken, so that the gradients of both stages are those of one θ.
"""

import copy
import sys
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.util import placement_group, remove_placement_group

LOW, HIGH = "low", "high"
RANKS, SAMPLES, PROMPT, RESPONSE = 2, 16, 5, 12


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # The workers cannot import this module: it travels with what they are sent.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_gpus=2 * RANKS, num_cpus=2 * RANKS + 2, log_to_driver=False)
    yield
    ray.shutdown()


def flags(model: str, *more: str) -> SimpleNamespace:
    """Upstream's nested arguments, from the real parser."""
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    args = hierarchize(
        parse(
            f"--actor.model_name_or_path {model} --actor.num_gpus_per_node {RANKS} --train.batch_size {SAMPLES} "
            f"--train.micro_batch_size 2 --ds.attn_implementation sdpa --algo.kl.use_loss --algo.kl.estimator k3 "
            f"--algo.kl.init_coef 0.1 --actor.eps_clip_low_high 0.2 0.24 --actor.lr_scheduler constant "
            f"--actor.lr_warmup_ratio 0 --actor.adam.lr 0 --rollout.batch_size {SAMPLES} "
            f"--rollout.n_samples_per_prompt 1 --train.max_tokens_per_gpu 40".split()
            + list(more)
        )
    )
    args.actor.eps_clip_low_high = tuple(args.actor.eps_clip_low_high)
    return args


def experiences(seed: int = 0, empty: tuple[int, ...] = (), kept_log_probs=None) -> list:
    """SAMPLES single-sample experiences with responses of 1 to RESPONSE tokens (none for those in `empty`).

    The old log-probs spread over (0, 1) in probability, and differ from the current policy's: ratios, clipping and KL
    are all at work.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i in range(SAMPLES):
        tokens = int(torch.randint(1, RESPONSE + 1, (1,), generator=generator))
        length = PROMPT + tokens
        action_mask = torch.zeros(1, length - 1, dtype=torch.long)
        if i not in empty:
            action_mask[0, PROMPT - 1 :] = 1

        def random_row(length=length):
            return torch.rand(1, length - 1, generator=generator)

        old = (0.05 + 0.9 * random_row()).log()
        if kept_log_probs is not None:
            old = kept_log_probs[i]
        batch.append(
            Experience(
                sequences=torch.randint(0, 256, (1, length), generator=generator),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                action_mask=action_mask,
                action_log_probs=old * action_mask,
                base_action_log_probs=(old - 0.5 * random_row()) * action_mask,
                rollout_log_probs=(old + 0.5 * random_row() - 0.25) * action_mask,
                advantages=4 * random_row() - 2,
                returns=random_row(),
                total_length=torch.tensor([float(length)]),
                response_length=torch.tensor([float(tokens)]),
                info={"uid": torch.tensor([float(i)]), "reward": torch.tensor([1.0])},
            )
        )
    return batch


def probe_class():
    """Upstream's policy actor, plus a look at what its trainer does."""
    import os

    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor

    from arlopti_openrlhf.policy_actor import TokenUpdateTrainer

    class Probe(PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__):
        def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None, float32=True):
            if float32:
                from openrlhf.utils import utils

                utils.convert_to_torch_dtype = lambda param_dtype: torch.float32
                strategy.args.ds.param_dtype = strategy.param_dtype = "fp32"
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
            self.max_steps = max_steps

        def run(self, batch, overrides, stock=False, rebuild=True, near_policy=False, nan_in_fresh_memory=False):
            """Trains once on this rank's samples; returns all that a test may ask for.

            `near_policy` moves the batch's log-probs to the current policy's, give or take what sets its own apart.
            """
            for name, value in overrides.items():
                *path, last = name.split(".")
                node = self.strategy.args
                for key in path:
                    node = getattr(node, key)
                setattr(node, last, value)
            self.actor.packing_samples = self.strategy.args.ds.packing_samples
            if rebuild:
                self.trainer = (ActorPPOTrainer if stock else TokenUpdateTrainer)(
                    self.strategy,
                    self.actor,
                    ema_model=self.ema_model,
                    actor_optim=self.actor_optim,
                    actor_scheduler=self.actor_scheduler,
                    micro_train_batch_size=self.strategy.args.train.micro_batch_size,
                    tokenizer=self.tokenizer,
                    ema_beta=self.strategy.args.train.ema_beta,
                )
            torch.manual_seed(7 + self._rank)
            seen, gradients, rates = self._watch()
            size = len(batch) // self._world_size
            for sample in copy.deepcopy(batch[self._rank * size : (self._rank + 1) * size]):
                if near_policy:
                    noise = sample.rollout_log_probs - sample.action_log_probs
                    reference = sample.base_action_log_probs - sample.action_log_probs
                    policy = self.forward(sample.sequences, sample.action_mask, sample.attention_mask)
                    sample.action_log_probs = policy + noise
                    sample.rollout_log_probs = sample.action_log_probs + noise.flip(1) * sample.action_mask
                    sample.base_action_log_probs = sample.action_log_probs + reference
                self.append(sample)
            torch.use_deterministic_algorithms(nan_in_fresh_memory, warn_only=True)
            steps = self.actor.model.global_steps
            status = self.fit(self.strategy.args.algo.kl.init_coef)
            del self.strategy.optimizer_step, self.trainer.training_step
            return SimpleNamespace(
                status=status,
                seen=seen,
                gradients=gradients,
                rates=rates,
                steps=self.actor.model.global_steps - steps,
                last_rate=self.actor_scheduler.get_last_lr()[0],
            )

        def _watch(self):
            from deepspeed.utils import safe_get_full_grad

            seen, gradients, rates = [], [], []
            optimizer_step, training_step = self.strategy.optimizer_step, self.trainer.training_step

            def watched_optimizer_step(optimizer, model, scheduler, **kwargs):
                dynamic = self.strategy.args.train.dynamic_batch_enable
                if dynamic or model.model.is_gradient_accumulation_boundary():
                    gradients.append([safe_get_full_grad(p).clone() for p in model.model.module.parameters()])
                    rates.append(scheduler.get_last_lr()[0])
                optimizer_step(optimizer, model, scheduler, **kwargs)

            def watched_training_step(experience, kl_ctl, step, info=None):
                uids = [int(uid) for uid in experience.info["uid"]]
                mask = experience.action_mask
                status = training_step(experience, kl_ctl, step, info)
                stage = getattr(self.trainer, "stage", None)
                updated = experience.action_mask.bool()
                seen.append((stage.group if stage else None, uids, mask.sum().item(), updated.sum().item()))
                return status

            self.strategy.optimizer_step = watched_optimizer_step
            self.trainer.training_step = watched_training_step
            return seen, gradients, rates

        def parameters(self):
            import deepspeed

            parameters = list(self.actor.model.module.parameters())
            with deepspeed.zero.GatheredParameters(parameters, enabled=self.strategy.args.ds.zero_stage == 3):
                return [p.detach().clone() for p in parameters]

    return ray.remote(Probe)


class Group:
    """RANKS probes of one model; `run` gives rank 0's view and checks that the ranks agree."""

    def __init__(self, args, max_steps=100, **init):
        from openrlhf.trainer.ray.launcher import RayActorGroup
        from openrlhf.utils import get_strategy

        self.placement = placement_group([{"GPU": 1, "CPU": 1}] * RANKS)
        ray.get(self.placement.ready())
        self.actors = RayActorGroup(1, RANKS, probe_class(), pg=self.placement, num_gpus_per_actor=1)
        strategy = get_strategy(args)
        ray.get(
            self.actors.async_init_model_from_pretrained(strategy, args.actor.model_name_or_path, max_steps, **init)
        )

    def run_ranks(self, batch, overrides=None, **kwargs):
        return ray.get(self.actors.async_run_method("run", batch, overrides or {}, **kwargs), timeout=240)

    def run(self, batch, overrides=None, **kwargs):
        results = self.run_ranks(batch, overrides, **kwargs)
        assert len({result.steps for result in results}) == 1, "ranks took different numbers of optimizer steps"
        return results[0]

    def parameters(self):
        return ray.get(self.actors.async_run_method("parameters"))[0]

    def close(self):
        for actor in self.actors._actor_handlers:
            ray.kill(actor)
        remove_placement_group(self.placement)


@pytest.fixture(params=[2, 3], ids=["zero2", "zero3"], scope="module")
def group(request, tiny_model):
    group = Group(flags(tiny_model, "--ds.zero_stage", str(request.param), "--actor.max_norm", "0"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def group_of_two_mini_batches(tiny_model):
    group = Group(flags(tiny_model, "--train.batch_size", str(SAMPLES // 2), "--actor.adam.lr", "1e-2"))
    yield group
    group.close()


def relative_distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    a, b = torch.cat([x.double().flatten() for x in a]), torch.cat([x.double().flatten() for x in b])
    return ((a - b).norm() / b.norm()).item()


OFF = {
    "algo.ar.alpha": 0.3,
    "algo.lopti.eta": None,
    "algo.lopti.quantile": None,
    "algo.lopti.scope": "batch",
    "algo.lopti.groups": "both",
    "algo.lopti.order": "low_first",
    "ds.packing_samples": False,
    "actor.loss_agg_mode": "token-mean",
    "actor.policy_loss_type": "ppo",
    "actor.dual_clip": None,
    "actor.entropy_coef": None,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "train.max_epochs": 1,
}

LOSSES = {
    "token-mean": {},
    "entropy and dual clip": {"actor.entropy_coef": 0.05, "actor.dual_clip": 3.0},
    "packed": {"ds.packing_samples": True, "actor.entropy_coef": 0.05},
    "seq-mean-token-mean": {"actor.loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean, packed": {"actor.loss_agg_mode": "seq-mean-token-mean", "ds.packing_samples": True},
    "gspo": {"actor.policy_loss_type": "gspo", "actor.entropy_coef": 0.05},
    "token importance sampling": {
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_threshold": [0.9, 1.1],
    },
    "sequence importance sampling": {
        "algo.advantage.is_correction_level": "seq",
        "algo.advantage.is_correction_threshold": [0.97, 1.03],
    },
    "quantile": {"algo.lopti.quantile": 0.3, "algo.lopti.eta": None},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_stages_gradients_sum_to_the_whole(group, loss):
    """grad(low) + grad(high) = grad, at one θ, with four micro-batches per optimizer step on each of two ranks."""
    batch = experiences(seed=1, empty=(3,))
    variant = {name: value for name, value in LOSSES[loss].items() if not name.startswith("algo.lopti")}
    # The random model gives a token about 1/320: this η divides them evenly.
    lopti = {"algo.lopti.eta": 0.003} | {n: v for n, v in LOSSES[loss].items() if n.startswith("algo.lopti")}
    whole = group.run(batch, OFF | variant, near_policy=True)
    staged = group.run(batch, OFF | variant | lopti, near_policy=True)
    assert len(whole.gradients) == 1 and len(staged.gradients) == 2
    low, high = staged.gradients
    total = [a + b for a, b in zip(low, high, strict=True)]
    assert relative_distance(total, whole.gradients[0]) < 1e-5
    # Neither stage is idle, or the whole: the sum is of two different things.
    assert min(relative_distance(low, whole.gradients[0]), relative_distance(high, whole.gradients[0])) > 0.1
    stages = ["low"] * 4 + ["high"] * 4
    assert [stage for stage, *_ in staged.seen] == stages


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_the_stages_gradients_sum_to_the_whole_dynamically_batched(tiny_model, zero_stage):
    more = ["--ds.zero_stage", str(zero_stage), "--actor.max_norm", "0", "--train.dynamic_batch_enable"]
    group = Group(flags(tiny_model, *more, "--ds.packing_samples"))
    try:
        batch = experiences(seed=2)
        packed = OFF | {"ds.packing_samples": True, "actor.entropy_coef": 0.05}
        whole = group.run(batch, packed)
        staged = group.run(batch, packed | {"algo.lopti.eta": 0.5})
        low, high = staged.gradients
        assert len(whole.gradients) == 1 and len(whole.seen) > 1
        assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole.gradients[0]) < 1e-5
    finally:
        group.close()


@pytest.mark.parametrize("token_mean", [True, False])
def test_group_loss_by_hand(token_mean):
    """Two responses of 3 and 2 tokens, ratios 1, 2, 1/2 | 1, 2: value, clip ratio and ppo_kl of the group alone."""
    from openrlhf.models import PolicyLoss

    from arlopti_openrlhf.policy_actor import GroupPolicyLoss

    response = torch.tensor([[1, 1, 1], [1, 1, 0]])
    group = torch.tensor([[1, 1, 0], [0, 1, 0]])
    log_ratio = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 1.0]]).log()
    old = torch.full((2, 3), -1.0)
    advantages = torch.tensor([[1.0, 3.0, 1.0], [1.0, -1.0, 5.0]])
    loss_fn = GroupPolicyLoss(PolicyLoss(0.2, 0.24, token_level_loss=token_mean))
    loss_fn.response_mask = response
    # The actor gives 0 outside the group.
    loss, clip_ratio, ppo_kl, *_ = loss_fn(
        (old + log_ratio) * group, old, advantages, action_mask=group, batch_num_tokens=5.0, global_batch_size=2.0
    )
    # Of the group: -1·1, clipped -1.24·3, and -(2·-1) = 2, over all 5 tokens or over each response's 3 and 2.
    expected = (-1 - 3.72 + 2) / 5 if token_mean else ((-1 - 3.72) / 3 + 2 / 2) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert clip_ratio.item() == pytest.approx(1 / 3)
    log2 = log_ratio[0, 1].item()
    assert ppo_kl.item() == pytest.approx(-2 * log2 / 3, rel=1e-6)


def test_one_group_alone_is_that_groups_stage(group):
    batch = experiences(seed=3)
    both = group.run(batch, OFF | {"algo.lopti.eta": 0.5})
    for name, gradient in zip(("low", "high"), both.gradients, strict=True):
        alone = group.run(batch, OFF | {"algo.lopti.eta": 0.5, "algo.lopti.groups": name})
        assert alone.steps == 1
        assert relative_distance(alone.gradients[0], gradient) < 1e-5
        assert f"lopti/{name}/actor_grad_norm" in alone.status


@pytest.mark.parametrize(
    "scope, order, expected",
    [
        ("batch", "low_first", ["low"] * 4 + ["high"] * 4),
        ("batch", "high_first", ["high"] * 4 + ["low"] * 4),
        ("minibatch", "low_first", ["low", "low", "high", "high"] * 2),
        ("minibatch", "high_first", ["high", "high", "low", "low"] * 2),
    ],
)
def test_order_of_the_steps(group_of_two_mini_batches, scope, order, expected):
    """Two mini-batches of two micro-batches per rank, two epochs: the passes come as design and flags say."""
    lopti = {"algo.lopti.eta": 0.5, "algo.lopti.scope": scope, "algo.lopti.order": order, "train.max_epochs": 2}
    batch = experiences(seed=4)
    result = group_of_two_mini_batches.run(batch, OFF | lopti)
    assert [stage for stage, *_ in result.seen] == expected * 2
    assert result.steps == 8

    def mini_batches(stage, epoch):
        passes = [uids for name, uids, *_ in result.seen[epoch * 8 : epoch * 8 + 8] if name == stage]
        return [set(passes[0] + passes[1]), set(passes[2] + passes[3])]

    for epoch in (0, 1):
        assert mini_batches(LOW, epoch) == mini_batches(HIGH, epoch)
        assert set.union(*mini_batches(LOW, epoch)) == set(range(SAMPLES // RANKS))
    # Shuffled anew each epoch.
    assert mini_batches(LOW, 0) != mini_batches(LOW, 1)
    # The groups are those of the sampling policy, whatever the weights have become.
    low = [(e.action_log_probs.exp() < 0.5).logical_and(e.action_mask.bool()) for e in batch]
    for stage, uids, before, updated in result.seen:
        tokens = sum(batch[i].action_mask.sum().item() for i in uids)
        low_tokens = sum(low[i].sum().item() for i in uids)
        assert before == tokens
        assert updated == (low_tokens if stage == LOW else tokens - low_tokens)


def test_stage_two_starts_from_stage_ones_weights(tiny_model):
    """Both stages in one update, and the two ablations one after the other, are the same two steps."""
    rate = ["--actor.adam.lr", "1e-2", "--train.micro_batch_size", str(SAMPLES // RANKS)]
    batch = experiences(seed=5)
    results = {}
    for name in ("both", "low then high", "whole"):
        group = Group(flags(tiny_model, *rate))
        try:
            if name == "low then high":
                for one in ("low", "high"):
                    group.run(batch, OFF | {"algo.lopti.eta": 0.5, "algo.lopti.groups": one})
            else:
                group.run(batch, OFF | ({"algo.lopti.eta": 0.5} if name == "both" else {}))
            results[name] = group.parameters()
        finally:
            group.close()
    assert relative_distance(results["low then high"], results["both"]) < 1e-5
    assert relative_distance(results["whole"], results["both"]) > 1e-3


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_off_is_bitwise_stock(tiny_model, zero_stage):
    """bf16 as in production, shuffled, two epochs of two mini-batches of two micro-batches: every bit the same."""
    batch = experiences(seed=6)
    parameters = {}
    for stock in (True, False):
        args = flags(
            tiny_model, "--ds.zero_stage", str(zero_stage), "--actor.adam.lr", "1e-2", "--train.batch_size", "8"
        )
        args.train.max_epochs = 2
        group = Group(args, float32=False)
        try:
            start = group.parameters()
            result = group.run(batch, {}, stock=stock)
            parameters[stock] = group.parameters()
            assert result.steps == 4 and not any(name.startswith(("lopti", "ar/")) for name in result.status)
        finally:
            group.close()
    assert all(torch.equal(a, b) for a, b in zip(parameters[True], parameters[False], strict=True))
    assert relative_distance(start, parameters[True]) > 1e-3


def test_no_memory_is_read_before_it_is_written(group):
    """PyTorch fills fresh memory with NaN: parameters that were used before they are gathered would show."""
    result = group.run(experiences(seed=12), OFF | {"algo.lopti.eta": 0.5}, nan_in_fresh_memory=True)
    assert_no_nan(result.status)
    assert all(torch.isfinite(g).all() for step in result.gradients for g in step)


def test_a_group_empty_on_every_rank_takes_no_step(group):
    batch = experiences(seed=7)
    result = group.run(batch, OFF | {"algo.lopti.eta": 1e-4})
    assert result.steps == 1 and {stage for stage, *_ in result.seen} == {"high"}
    assert result.status["lopti/low_share"] == 0
    assert_no_nan(result.status)


def test_a_group_empty_on_one_rank_is_survived(group):
    """Rank 1 has no low token, rank 0 has them in one micro-batch alone."""
    log_probs = [torch.full((1, e.action_mask.shape[1]), -0.1) for e in experiences(seed=8)]
    log_probs[2][0, -1] = -3.0
    batch = experiences(seed=8, kept_log_probs=log_probs)
    batch[2].advantages[0, -1] = 1.0  # a ratio below 1 is not clipped then
    results = group.run_ranks(batch, OFF | {"algo.lopti.eta": 0.5, "actor.entropy_coef": 0.0})
    assert [r.steps for r in results] == [2, 2]
    for result in results:
        assert_no_nan(result.status)
        assert result.status["lopti/low/num_tokens"] == 1
        assert all(torch.isfinite(g).all() for step in result.gradients for g in step)
    # The one token's gradient is not diluted by the micro-batches without any.
    assert max(g.abs().max().item() for g in results[0].gradients[0]) > 0


def test_responses_without_tokens_are_survived(group):
    batch = experiences(seed=9, empty=tuple(range(1, SAMPLES)))
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        for quantile in (None, 0.5):
            lopti = {"algo.lopti.eta": None if quantile else 0.5, "algo.lopti.quantile": quantile}
            result = group.run(batch, OFF | lopti | {"actor.loss_agg_mode": aggregation, "actor.entropy_coef": 0.0})
            assert_no_nan(result.status)
            assert all(torch.isfinite(g).all() for step in result.gradients for g in step)
    nothing = group.run(experiences(seed=9, empty=tuple(range(SAMPLES))), OFF | {"algo.lopti.quantile": 0.5})
    assert nothing.steps == 0
    assert_no_nan(nothing.status)


def test_metrics_of_both_stages(group):
    batch = experiences(seed=10)
    status = group.run(batch, OFF | {"algo.lopti.eta": 0.5, "actor.entropy_coef": 0.0}).status
    assert_no_nan(status)
    tokens = {LOW: 0, HIGH: 0}
    weight = 0.0
    for e in batch:
        for p in e.action_log_probs[e.action_mask.bool()].exp().tolist():
            tokens[LOW if p < 0.5 else HIGH] += 1
            weight += 0.3 * p + 0.7
    for stage, count in tokens.items():
        assert status[f"lopti/{stage}/num_tokens"] == count
        for name in ("policy_loss", "ppo_clip_ratio", "ppo_kl", "kl", "actor_grad_norm", "entropy_loss"):
            assert f"lopti/{stage}/{name}" in status
    total = sum(tokens.values())
    assert status["lopti/low_share"] == pytest.approx(tokens[LOW] / total)
    assert status["ar/mean_weight"] == pytest.approx(weight / total, rel=1e-5)
    assert status["policy_loss"] == pytest.approx(
        status["lopti/low/policy_loss"] + status["lopti/high/policy_loss"], rel=1e-5
    )


def test_learning_rate_spans_the_doubled_steps(tiny_model):
    """At equal data, equal learning rate, to the last bit; also where a group (η = 1e-4) is empty on all ranks."""
    cosine = [
        "--actor.lr_scheduler",
        "cosine_with_min_lr",
        "--actor.lr_warmup_ratio",
        "0.3",
        "--actor.adam.lr",
        "1e-3",
    ]
    batch = experiences(seed=11)
    rates = {}
    for eta in (None, 0.5, 1e-4):
        group = Group(flags(tiny_model, *cosine), max_steps=6)
        try:
            configuration = OFF | {"algo.lopti.eta": eta}
            rates[eta] = [group.run(batch, configuration, rebuild=i == 0).last_rate for i in range(6)]
        finally:
            group.close()
    assert rates[None] == rates[0.5] == rates[1e-4]
    assert len(set(rates[None])) > 3


def assert_no_nan(status: dict) -> None:
    values = {name: value for name, value in status.items() if isinstance(value, int | float)}
    assert values.keys() == status.keys()
    assert all(value == value for value in values.values()), values
