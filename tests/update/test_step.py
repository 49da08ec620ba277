"""Our step beside upstream's, which it restates: without a method they are equal bit for bit."""

import pytest
import torch
from arlopti_testing.update_workers import (
    LOSSES,
    OFF,
    RANKS,
    SAMPLES,
    Group,
    experiences,
    flags,
    relative_distance,
)
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

pytestmark = [pytest.mark.whole_stack, pytest.mark.usefixtures("ray_cluster")]
NO_METHOD = OFF | {"algo.ar.alpha": 0.0, "logger.probability_stats": "off"}
OURS = NO_METHOD | {"logger.probability_stats": "bins"}  # for which upstream's loop takes our step


@pytest.fixture(params=[2, 3], ids=["zero2", "zero3"], scope="module")
def group(request, tiny_model):
    """Two optimizer steps of two micro-batches each."""
    return Group(flags(tiny_model, "--ds.zero_stage", str(request.param), "--train.batch_size", str(SAMPLES // 2)))


def assert_equal(group: Group, overrides: dict, steps: int) -> None:
    batch = experiences(seed=1, empty=(3,))
    stock = group.run(batch, NO_METHOD | overrides, stock=True)
    ours = group.run(batch, OURS | overrides)
    assert ours.steps == stock.steps == steps
    assert len(ours.seen) == len(stock.seen) >= steps
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert all(map(torch.equal, a, b))
        assert any(gradient.abs().max() > 0 for gradient in a)
    added = {name for name in ours.status if name.startswith("tokens/")} | {"skipped_optimizer_steps", "rollout/gap"}
    assert {name: value for name, value in ours.status.items() if name not in added} == stock.status


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "quantile"])
def test_equals_upstreams(group, loss):
    assert_equal(group, LOSSES[loss], steps=2)


@pytest.mark.parametrize(
    "kl",
    [
        {"algo.kl.use_loss": False},
        {"algo.kl.init_coef": 0.0},
        {"algo.kl.estimator": "k1", "algo.kl.unbiased_gradient": True},
    ],
    ids=["no KL loss", "coefficient 0", "unbiased k1"],
)
def test_equals_upstreams_whatever_the_kl(group, kl):
    as_it_was = {"algo.kl.use_loss": True, "algo.kl.init_coef": 0.1, "algo.kl.estimator": "k3"}
    assert_equal(group, as_it_was | {"algo.kl.unbiased_gradient": False} | kl, steps=2)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_equals_upstreams_dynamically_batched(tiny_model, zero_stage):
    dynamic = ["--train.dynamic_batch_enable", "--ds.packing_samples", "--ds.zero_stage", str(zero_stage)]
    group = Group(flags(tiny_model, *dynamic, "--actor.entropy_coef", "0.05"))
    assert_equal(group, {"ds.packing_samples": True, "actor.entropy_coef": 0.05}, steps=1)


@pytest.fixture(scope="module")
def experts(tiny_model, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("experts"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.2,
        sliding_window=None,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def test_experts_are_balanced_once(experts):
    """Equal to upstream's with everything off; with Lopti the stages' gradients add up, the balancing loss's too."""
    # One micro-batch: the balancing loss depends on which samples share one.
    one = ["--train.micro_batch_size", str(SAMPLES // RANKS)]
    group = Group(flags(experts, "--actor.aux_loss_coef", "0.5", "--actor.max_norm", "0", *one))
    assert_equal(group, {}, steps=1)
    batch, balanced = experiences(seed=2), NO_METHOD | {"actor.aux_loss_coef": 0.5}
    whole = group.run(batch, balanced, near_policy=True)
    without = group.run(batch, balanced | {"actor.aux_loss_coef": 0.0}, near_policy=True)
    low, high = group.run(batch, balanced | {"algo.lopti.eta": 0.003}, near_policy=True).gradients
    assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole.gradients[0]) < 1e-5
    assert relative_distance(without.gradients[0], whole.gradients[0]) > 1e-2


def test_the_average_of_the_weights_is_upstreams(tiny_model):
    """EMA over two optimizer steps; with Lopti the stages share a step's decay."""
    averages = {}
    for name in ("stock", "ours", "Lopti"):
        ema = ["--train.enable_ema", "--train.ema_beta", "0.5", "--actor.adam.lr", "1e-3"]
        group = Group(flags(tiny_model, *ema, "--train.batch_size", str(SAMPLES // 2)))
        overrides = OURS | ({"algo.lopti.eta": 0.5} if name == "Lopti" else {})
        group.run(experiences(seed=3), overrides, stock=name == "stock")
        averages[name] = group.parameters(averaged=True)
    assert all(map(torch.equal, averages["ours"], averages["stock"]))
    assert 0 < relative_distance(averages["Lopti"], averages["stock"]) < 1e-2


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_average_counts_a_group_that_is_empty(tiny_model, stage):
    """Two updates whose low group is empty: a stage without a step averages too, as the decay is that of the data."""
    beta, ema = 0.5, ["--train.enable_ema", "--train.ema_beta", "0.5", "--actor.adam.lr", "1e-3"]
    group = Group(flags(tiny_model, *ema, "--ds.zero_stage", stage))
    expected = start = group.parameters()
    for seed in (4, 5):
        before = group.parameters()
        group.run(experiences(seed=seed), NO_METHOD | {"algo.lopti.eta": 1e-9})
        for weights in (before, group.parameters()):  # after the low stage, and after the high one
            expected = [beta**0.5 * e + (1 - beta**0.5) * w for e, w in zip(expected, weights, strict=True)]
    found = group.parameters(averaged=True)
    moved = [w - s for w, s in zip(found, start, strict=True)]
    assert relative_distance(moved, [e - s for e, s in zip(expected, start, strict=True)]) < 1e-3
