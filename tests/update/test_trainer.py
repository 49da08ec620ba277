"""The update through real Ray workers, with two ranks under DeepSpeed: the reference's and the selective one's."""

import pytest
import torch
from arlopti_testing.update_workers import (
    HIGH,
    LOSSES,
    LOW,
    OFF,
    RANKS,
    SAMPLES,
    Group,
    assert_no_nan,
    experiences,
    flags,
    relative_distance,
)

from arlopti_openrlhf.update.settings import Settings

pytestmark = [pytest.mark.whole_stack, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(
    params=[
        pytest.param("reference zero2", marks=pytest.mark.long),
        pytest.param("reference zero3", marks=pytest.mark.long),
        pytest.param("selective zero2", marks=pytest.mark.long),
        "selective zero3",
    ],
    scope="module",
)
def group(request, tiny_model):
    kind, zero = request.param.split()
    more = ("--ds.zero_stage", zero[-1], "--actor.max_norm", "0")
    return Group(flags(tiny_model, *more), selective=kind == "selective", off_policy=True)


@pytest.fixture(scope="module")
def group_of_two_mini_batches(tiny_model):
    more = ("--train.batch_size", str(SAMPLES // 2), "--actor.adam.lr", "1e-2")
    return {kind: Group(flags(tiny_model, *more), selective=kind, off_policy=True) for kind in (False, True)}


GATE = ("token-mean", "gspo", "seq-mean, packed")  # of the losses, what `make test` takes


@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=() if loss in GATE else pytest.mark.long) for loss in LOSSES]
)
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
    stages = [stage for stage, *_ in staged.seen]
    assert stages == sorted(stages, reverse=True) and set(stages) == {"low", "high"}


def test_settings_take_the_place_of_flags(group):
    """As in a launcher without our flags: the flags here ask for nothing."""
    batch, nothing = experiences(seed=3), OFF | {"algo.ar.alpha": None, "logger.probability_stats": "off"}
    settings = Settings(("lopti", "ar"), ("lopti.eta=0.5", "ar.alpha=0.3"), statistics="bins")
    given = group.run(batch, nothing, settings=settings)
    flags = group.run(batch, OFF | {"algo.lopti.eta": 0.5, "logger.probability_stats": "bins"})
    assert len(given.gradients) == 2 and given.status == flags.status
    assert all(map(torch.equal, sum(given.gradients, []), sum(flags.gradients, [])))


def test_one_group_alone_is_that_groups_stage(group):
    batch = experiences(seed=3)
    both = group.run(batch, OFF | {"algo.lopti.eta": 0.5})
    for name, gradient in zip(("low", "high"), both.gradients, strict=True):
        alone = group.run(batch, OFF | {"algo.lopti.eta": 0.5, "algo.lopti.groups": name})
        assert alone.steps == 1
        assert relative_distance(alone.gradients[0], gradient) < 1e-5
        norm = alone.status[f"lopti/{name}/actor_grad_norm"]
        assert alone.status[f"lopti/{name}/clip_factor"] == min(1.0, 1.0 / norm)  # one step, and upstream's max_norm


@pytest.mark.parametrize("selective", [False, True], ids=["reference", "selective"])
@pytest.mark.parametrize(
    "scope, order, expected",
    [
        ("batch", "low_first", [LOW, LOW, HIGH, HIGH]),
        ("batch", "high_first", [HIGH, HIGH, LOW, LOW]),
        ("minibatch", "low_first", [LOW, HIGH, LOW, HIGH]),
        ("minibatch", "high_first", [HIGH, LOW, HIGH, LOW]),
    ],
)
def test_order_of_the_steps(group_of_two_mini_batches, scope, order, expected, selective):
    """Two mini-batches per rank, three epochs: the passes come as design and flags say."""
    if scope == "minibatch" and not selective:
        pytest.skip("the reference has only the published order")
    lopti = {"algo.lopti.eta": 0.5, "algo.lopti.scope": scope, "algo.lopti.order": order, "train.max_epochs": 3}
    batch = experiences(seed=4)
    result = group_of_two_mini_batches[selective].run(batch, OFF | lopti)
    assert result.steps == 12
    # Micro-batches of one rank, until they hold a mini-batch's samples
    passes = [[]]
    for stage, uids, *_ in result.seen:
        if sum(len(others) for _, others in passes[-1]) == SAMPLES // RANKS // 2:
            passes.append([])
        passes[-1].append((stage, uids))
    assert [{stage for stage, _ in of_pass} for of_pass in passes] == [{stage} for stage in expected * 3]

    def mini_batches(stage, epoch):
        of_epoch = passes[epoch * 4 : epoch * 4 + 4]
        return [{uid for _, uids in of_pass for uid in uids} for of_pass in of_epoch if of_pass[0][0] == stage]

    for epoch in range(3):
        assert mini_batches(LOW, epoch) == mini_batches(HIGH, epoch)
        assert set.union(*mini_batches(LOW, epoch)) == set(range(SAMPLES // RANKS))
    # Shuffled anew each epoch. Two of the three may draw the same halves, as happens 1 time in 35 to any two.
    assert any(mini_batches(LOW, epoch) != mini_batches(LOW, 0) for epoch in (1, 2))
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
        if name == "low then high":
            for one in ("low", "high"):
                group.run(batch, OFF | {"algo.lopti.eta": 0.5, "algo.lopti.groups": one})
        else:
            group.run(batch, OFF | ({"algo.lopti.eta": 0.5} if name == "both" else {}))
        results[name] = group.parameters()
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
        start = group.parameters()
        result = group.run(batch, {}, stock=stock)
        parameters[stock] = group.parameters()
        assert result.steps == 4 and not any(name.startswith(("lopti", "ar/")) for name in result.status)
    assert all(torch.equal(a, b) for a, b in zip(parameters[True], parameters[False], strict=True))
    assert relative_distance(start, parameters[True]) > 1e-3


def test_no_memory_is_read_before_it_is_written(group):
    """PyTorch fills fresh memory with NaN: parameters that were used before they are gathered would show."""
    result = group.run(experiences(seed=12), OFF | {"algo.lopti.eta": 0.5}, nan_in_fresh_memory=True)
    assert_no_nan(result.status)
    assert all(torch.isfinite(g).all() for step in result.gradients for g in step)


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


@pytest.mark.parametrize(
    "selective", [pytest.param(False, marks=pytest.mark.long, id="stock"), pytest.param(True, id="selective")]
)
def test_learning_rate_spans_the_doubled_steps(tiny_model, selective):
    """At equal data, equal learning rate, to the last bit; also where a group (η = 1e-9) is empty on all ranks,
    which the selective update's first pass learns only on its way.

    Each update has a trainer of its own: a schedule that was stretched before is not stretched again.
    """
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
    for eta in (None, 0.5, 1e-9):
        group = Group(flags(tiny_model, *cosine), max_steps=6, selective=selective)
        configuration = OFF | {"algo.lopti.eta": eta}
        rates[eta] = [group.run(batch, configuration, on_policy=selective).last_rate for _ in range(6)]
    assert rates[None] == rates[0.5] == rates[1e-9]
    assert len(set(rates[None])) > 3
