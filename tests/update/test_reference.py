"""The reference and the selective update compute the same gradients, in every pass, under every loss both take."""

import itertools

import pytest
import torch
from arlopti_testing.update_workers import (
    LOSSES,
    OFF,
    RANKS,
    SAMPLES,
    Group,
    assert_no_nan,
    experiences,
    flags,
    relative_distance,
)
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from arlopti_openrlhf import token_method
from arlopti_openrlhf.methods import built_in

pytestmark = [pytest.mark.whole_stack, pytest.mark.usefixtures("ray_cluster")]
NONE = OFF | {"algo.ar.alpha": None}
BOTH = OFF | {"algo.lopti.eta": 0.5}
WITH_ROLLOUT = {"algo.advantage.is_correction_level": "token"}
# Every method that reads no entropies, as its flags; `lopti` and `ar` as flags too.
METHODS = (
    {
        "AR": OFF,
        "AR + Lopti": BOTH,
        "Lopti by quantile": NONE | {"algo.lopti.quantile": 0.3},
        "AR + Lopti, normalized": BOTH | {"algo.token_method_normalize": True},
    }
    | {name: NONE | {"algo.token_method": [name]} for name in ("a3po", "clip_cov", "cw_grpo", "positive_weight")}
    | {"dppo": NONE | {"algo.token_method": ["dppo"]} | WITH_ROLLOUT}
)
BAND = ["surprisal_band.lo=1", "surprisal_band.hi=2"]
# ZeRO's stage, ranks. The others take too long for every change.
LAYOUTS = [(3, 2), *(pytest.param(layout, marks=pytest.mark.long) for layout in ((2, 1), (2, 2), (3, 1)))]
STAR = [("AR + Lopti", loss) for loss in LOSSES] + [(method, "token-mean") for method in ("AR", "cw_grpo", "dppo")]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"zero{layout[0]}, {layout[1]} ranks")
def pair(request, tiny_model):
    """The reference and the selective update, with one mini-batch of several micro-batches."""
    zero, ranks = request.param
    more = f"--ds.zero_stage {zero} --actor.max_norm 0 --actor.num_gpus_per_node {ranks}".split()
    return [Group(flags(tiny_model, *more), selective=kind, off_policy=True, ranks=ranks) for kind in (False, True)]


def compare(pair: list[Group], method: str, loss: str) -> float:
    """Return the largest relative distance of the gradients of all passes."""
    if loss == "gspo" and method not in ("AR", "AR + Lopti", "Lopti by quantile"):
        pytest.skip("GSPO has one ratio for a sequence")
    batch = experiences(seed=21, empty=(3,), samples_per_prompt=4)
    reference, selective = (group.run(batch, METHODS[method] | LOSSES[loss]) for group in pair)
    assert reference.steps == selective.steps == len(reference.gradients) == len(selective.gradients)
    assert_no_nan(reference.status)
    return max(itertools.starmap(relative_distance, zip(reference.gradients, selective.gradients, strict=True)))


@pytest.mark.parametrize(("method", "loss"), STAR)
def test_the_gradients_are_the_selective_updates(pair, method, loss):
    assert compare(pair, method, loss) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradients_are_the_selective_updates_under_every_loss(pair, method, loss):
    assert compare(pair, method, loss) < 1e-5


def test_no_method_is_missing_above():
    """Methods that read entropies, or divide by the tokens that they keep, are refused."""
    loaded = {method.name: method for method in token_method.load([*built_in()], BAND)}
    refused = {name for name, method in loaded.items() if method.needs_entropies or method.divides_by_kept}
    assert loaded.keys() - refused - {"ar", "lopti"} == METHODS.keys() & loaded.keys() and len(refused) == 7


@pytest.mark.parametrize("zero", [2, 3])
def test_a_weight_of_one_is_upstreams_update_bit_for_bit(tiny_model, zero):
    """AR with α = 0, in two epochs of two mini-batches that are shuffled."""
    more = f"--ds.zero_stage {zero} --train.batch_size {SAMPLES // 2} --actor.adam.lr 1e-2".split()
    ones = NONE | {"algo.token_method": ["ar"], "algo.token_method_args": ["ar.alpha=0"], "train.max_epochs": 2}
    batch, parameters = experiences(seed=22), {}
    for stock in (True, False):
        group = Group(flags(tiny_model, *more))
        assert group.run(batch, ones, stock=stock).steps == 4
        parameters[stock] = group.parameters()
    assert all(map(torch.equal, parameters[True], parameters[False]))


def test_a_short_mini_batch_leaks_into_no_pass(tiny_model):
    """Of 8 samples a rank, in mini-batches of 6, two are left out: the passes have the gradients of the other six."""
    more = "--train.batch_size 12 --actor.max_norm 0".split()
    group, batch = Group(flags(tiny_model, *more)), experiences(seed=24)
    short = group.run(batch, BOTH)
    whole = group.run(batch[:6] + batch[8:14], BOTH)
    assert short.steps == whole.steps == 2 and len(short.seen) == 6
    for a, b in zip(short.gradients, whole.gradients, strict=True):
        assert relative_distance(a, b) < 1e-5


def test_a_rollout_batch_that_fills_no_mini_batch_is_left_out(tiny_model):
    """As at an episode's end. The run goes on."""
    group = Group(flags(tiny_model, "--train.batch_size", "12"))
    before = group.parameters()
    assert group.run(experiences(seed=27)[:8], BOTH).steps == 0
    assert all(map(torch.equal, before, group.parameters()))


def test_momentum_moves_nothing_where_a_pass_has_no_token(tiny_model):
    """After an update with both groups, one whose low group is empty on all ranks is that of the high group alone."""
    ended = []
    for second in ({"algo.lopti.eta": 1e-9}, {"algo.lopti.eta": 1e-9, "algo.lopti.groups": "high"}):
        group = Group(flags(tiny_model, "--actor.adam.lr", "1e-2"))
        group.run(experiences(seed=25), BOTH)
        assert group.run(experiences(seed=26), OFF | second).steps == 1
        ended.append(group.parameters())
    assert relative_distance(*ended) < 1e-6


@pytest.mark.parametrize("zero", [2, 3])
def test_dynamic_batches_keep_the_gradients_of_all_micro_batches(tiny_model, zero):
    """OpenRLHF's loop under ZeRO-2 keeps those of the last one."""
    more = f"--ds.zero_stage {zero} --actor.max_norm 0".split()
    batch, packed = experiences(seed=27), BOTH | {"ds.packing_samples": True, "actor.entropy_coef": 0.05}
    whole = Group(flags(tiny_model, *more)).run(batch, packed)
    dynamic = Group(flags(tiny_model, *more, "--train.dynamic_batch_enable", "--ds.packing_samples")).run(
        batch, packed
    )
    assert len(dynamic.seen) > 2 and dynamic.steps == 2
    assert max(map(relative_distance, dynamic.gradients, whole.gradients)) < 1e-5


@pytest.mark.parametrize("zero", [2, 3])
def test_ema_and_the_schedule_are_those_of_one_pass(tiny_model, zero):
    """EMA's decay of 0.25 over two passes is 0.5 in each; the rate spans the doubled steps."""
    more = f"--train.enable_ema --train.ema_beta 0.25 --actor.adam.lr 1e-2 --ds.zero_stage {zero}".split()
    group = Group(flags(tiny_model, *more))
    start = group.parameters(averaged=True)
    group.run(experiences(seed=28), NONE | {"algo.lopti.eta": 1e-9, "algo.lopti.groups": "high"})
    for before, after, average in zip(start, group.parameters(), group.parameters(averaged=True), strict=True):
        assert torch.allclose(average, 0.25 * before + 0.75 * after, atol=1e-6)
    group = Group(flags(tiny_model, *more))
    group.run(experiences(seed=28), NONE | {"algo.lopti.eta": 1e-9})  # the low pass leaves θ, and averages it too
    for before, after, average in zip(start, group.parameters(), group.parameters(averaged=True), strict=True):
        assert torch.allclose(average, 0.5 * before + 0.5 * after, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"algo.token_method": ["steer"]}, r"read entropies or divide .* \(steer\) need the selective update"),
        ({"algo.lopti.eta": 0.5, "algo.lopti.scope": "minibatch"}, "--algo.lopti.scope minibatch needs the selective"),
        ({"algo.token_method": ["dppo"]}, "token methods dppo need --algo.advantage.is_correction_level token"),
        ({"algo.token_method": ["a3po"], "actor.policy_loss_type": "gspo"}, "a3po: GSPO has one ratio"),
        ({"algo.lopti.eta": 0.5, "train.batch_size": 64}, "--train.batch_size 64: a rollout batch has 16 samples"),
    ],
)
def test_what_it_does_not_have_is_refused(tiny_model, asked, message):
    group = Group(flags(tiny_model))
    with pytest.raises(Exception, match=message):
        group.run(experiences(seed=29), NONE | asked)


@pytest.fixture(scope="module")
def experts(tiny_model, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("experts"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=4)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, sliding_window=None)
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("selective", [False, True], ids=["reference", "selective"])
def test_experts_are_balanced_once(experts, selective):
    """The gradients of Lopti's passes add up, the balancing loss's too."""
    # One micro-batch: the balancing loss depends on which samples share one.
    one = ["--train.micro_batch_size", str(SAMPLES // RANKS), "--actor.max_norm", "0"]
    group = Group(flags(experts, "--actor.aux_loss_coef", "0.5", *one), selective=selective, off_policy=True)
    batch, ones = experiences(seed=2), NONE | {"algo.token_method": ["ar"], "algo.token_method_args": ["ar.alpha=0"]}
    whole = group.run(batch, ones, near_policy=True).gradients[0]
    low, high = group.run(batch, NONE | {"algo.lopti.eta": 0.003}, near_policy=True).gradients
    # Last, as workers keep what they are told.
    without = group.run(batch, ones | {"actor.aux_loss_coef": 0.0}, near_policy=True).gradients[0]
    assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole) < 1e-5
    assert relative_distance(without, whole) > 1e-2
