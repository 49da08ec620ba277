"""A step whose loss or gradient is not finite on one of two ranks leaves no trace on either."""

import copy
import math
import sys
from types import SimpleNamespace

import pytest
import ray
import torch
from arlopti_testing.update_workers import (
    OFF,
    RANKS,
    SAMPLES,
    Group,
    assert_no_nan,
    experiences,
    flags,
    full_parameters,
)
from torch.utils._python_dispatch import TorchDispatchMode

from arlopti_openrlhf.ops.health.guard import first_non_finite

pytestmark = [pytest.mark.whole_stack, pytest.mark.usefixtures("ray_cluster")]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this module

NO_METHOD = OFF | {"algo.ar.alpha": None, "logger.probability_stats": "off"}
LOPTI = OFF | {"algo.lopti.eta": 0.5}
TRAINING = ["--actor.adam.lr", "1e-2", "--actor.lr_scheduler", "linear", "--train.enable_ema"]
DYNAMIC = ["--train.dynamic_batch_enable", "--ds.packing_samples"]


def with_nan(batch: list, field: str) -> list:
    """Put NaN on the response tokens of each of rank 0's samples."""
    batch = copy.deepcopy(batch)
    for sample in batch[: SAMPLES // RANKS]:
        getattr(sample, field).masked_fill_(sample.action_mask.bool(), torch.nan)
    return batch


def everything(probe, *ignored, **ignored_too) -> SimpleNamespace:
    """Return all that an optimizer step may change, as this rank sees it. Runs in a worker."""
    engine = probe.actor.model
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # in float32, stage 0 has PyTorch's
    moments = [
        value.clone()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return SimpleNamespace(
        weights=full_parameters(probe),
        average=full_parameters(probe, averaged=True),
        moments=moments,
        rate=probe.actor_scheduler.get_last_lr(),
        non_finite=first_non_finite(engine),
    )


def is_same(a: SimpleNamespace, b: SimpleNamespace) -> bool:
    tensors = ([*state.weights, *state.average, *state.moments] for state in (a, b))
    return a.rate == b.rate and all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))


def look(group: Group) -> list[SimpleNamespace]:
    return ray.get(group.workers[group.kind].async_run_method("call", everything))


# The ratio's `clamp` gives a NaN the gradient 0, so that rank 0's gradient is 0 and the other's is as it was.
NO_KL = OFF | {"algo.kl.use_loss": False}
WITH_KL = {"algo.kl.use_loss": True}

CASES = {
    "zero0, bf16": (["--ds.zero_stage", "0"], False, OFF, "advantages"),
    "zero0, bf16, a loss without a gradient": (["--ds.zero_stage", "0"], False, NO_KL, "action_log_probs"),
    "zero0, float32": (["--ds.zero_stage", "0"], True, OFF, "advantages"),
    "zero2, bf16, a loss without a gradient": (["--ds.zero_stage", "2"], False, NO_KL, "action_log_probs"),
    "zero3, bf16, a loss without a gradient": (["--ds.zero_stage", "3"], False, NO_KL, "action_log_probs"),
    "zero2, bf16, upstream's step": (["--ds.zero_stage", "2"], False, NO_METHOD, "advantages"),
    "zero2, float32": (["--ds.zero_stage", "2"], True, OFF, "action_log_probs"),
    "zero2, offload": (["--ds.zero_stage", "2", "--ds.adam_offload"], False, LOPTI, "base_action_log_probs"),
    "zero3, bf16": (["--ds.zero_stage", "3"], False, OFF, "advantages"),
    "zero3, float32, upstream's step": (["--ds.zero_stage", "3"], True, NO_METHOD, "action_log_probs"),
    "zero3, offload": (["--ds.zero_stage", "3", "--ds.adam_offload"], False, OFF, "advantages"),
    "zero2, dynamic": (["--ds.zero_stage", "2", *DYNAMIC], False, LOPTI, "advantages"),
    "zero3, dynamic": (["--ds.zero_stage", "3", *DYNAMIC], False, NO_METHOD, "advantages"),
}


# `make test` takes one of each stage and precision. Offloading compiles DeepSpeed's CPU Adam.
GATE = ("zero2, bf16, a loss without a gradient", "zero3, float32, upstream's step")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in GATE else [pytest.mark.long]) for c in CASES])
def test_a_refused_step_is_no_step(tiny_model, case):
    more, float32, overrides, field = CASES[case]
    group = Group(flags(tiny_model, *more, *TRAINING), float32=float32)
    overrides = WITH_KL | overrides | {"ds.packing_samples": "--ds.packing_samples" in more}
    steps = 2 if overrides["algo.lopti.eta"] else 1
    batch = experiences(seed=1)
    start = look(group)
    # The trainer is kept, as its EMA counts micro-batches.
    assert group.run(batch, overrides).status["skipped_optimizer_steps"] == 0
    before = look(group)
    assert not is_same(start[0], before[0])
    refused = group.run_ranks(with_nan(batch, field), overrides, rebuild=False)
    # Both ranks refuse, also the one whose loss was finite.
    assert [rank.status["skipped_optimizer_steps"] for rank in refused] == [steps, steps]
    norms = [value for name, value in refused[0].status.items() if name.endswith("actor_grad_norm")]
    assert norms and all(map(math.isnan, norms))
    assert all(map(is_same, before, look(group)))
    # What was refused is forgotten: the next step is that of a run that never saw it.
    again = group.run(batch, overrides, rebuild=False)
    after = look(group)
    assert_no_nan(again.status)
    assert again.status["skipped_optimizer_steps"] == 0 and after[0].non_finite is None
    untouched = Group(flags(tiny_model, *more, *TRAINING), float32=float32)
    for rebuild in (True, False):
        untouched.run(batch, overrides, rebuild=rebuild)
    assert all(map(is_same, after, look(untouched)))


@pytest.mark.parametrize("stage", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_finite_gradients_whose_norm_overflows_are_refused(tiny_model, stage):
    """Advantages of 1e30 have gradients whose squares no float32 holds. With ZeRO-3, DeepSpeed has them in float64."""
    group = Group(flags(tiny_model, "--ds.zero_stage", stage, *TRAINING), selective=True)
    before, batch = look(group), experiences(seed=1)
    for sample in batch:
        sample.advantages *= 1e30
    refused = group.run(batch, NO_METHOD | {"algo.kl.use_loss": False}, on_policy=True)
    assert all(gradient.isfinite().all() for gradient in refused.gradients[0])
    assert refused.status["skipped_optimizer_steps"] == (stage == "2")
    assert [*map(is_same, before, after := look(group))] == [stage == "2"] * RANKS and after[0].non_finite is None


# The stages drop their gradients in different ways. `make test` takes one of them.
@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s == "2" else [pytest.mark.long]) for s in "0123"])
def test_a_mini_batch_that_was_skipped_is_forgotten(tiny_model, stage):
    """No response has a token, as the first pass learns on its way. Its loss is 0 / 0."""
    group = Group(flags(tiny_model, "--ds.zero_stage", stage, *TRAINING), selective=True)
    nothing, batch = experiences(seed=1, empty=tuple(range(SAMPLES))), experiences(seed=1, samples_per_prompt=4)
    before = look(group)
    assert group.run(nothing, LOPTI, on_policy=True).steps == 0
    done = group.run(batch, LOPTI, on_policy=True, rebuild=False)
    assert done.steps == 1 and done.status["skipped_optimizer_steps"] == 0  # all tokens are in the low group
    assert_no_nan(done.status)
    assert not any(map(is_same, before, look(group)))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_weights_that_are_not_finite_let_no_step_through(tiny_model, stage):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(probe) -> None:
        weight = dict(probe.actor.model.module.named_parameters())[name]
        (weight.ds_tensor if stage == "3" else weight).data.flatten()[-1] = torch.nan

    group = Group(flags(tiny_model, "--ds.zero_stage", stage, *TRAINING), float32=False)
    before = look(group)
    ray.get(group.workers[group.kind].async_run_method("call", spoil))
    assert [rank.non_finite for rank in look(group)] == [name, name]
    for _ in range(2):
        assert group.run(experiences(seed=1), LOPTI).status["skipped_optimizer_steps"] == 2
    for rank, as_it_was in zip(look(group), before, strict=True):
        assert rank.rate == as_it_was.rate
        # DeepSpeed makes the moments at the first step that it takes.
        assert len(rank.moments) == len(as_it_was.moments)
        assert all(map(torch.equal, rank.moments, as_it_was.moments))


class Operators(TorchDispatchMode):
    """Counts operators that make no view: a GPU would launch a kernel for each."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("stage", "float32", "most"), [("1", False, 3), ("2", False, 3), ("2", True, 3), ("3", False, 7)]
)
def test_an_optimizer_step_has_few_operators_for_each_parameter(tiny_model, stage, float32, most):
    """No check looks at each of them, and no timer waits for them. ZeRO-3 divides each parameter again."""

    def watch(probe) -> int:
        step, probe.counted = probe.strategy.optimizer_step, []

        def counted(*args, **kwargs):
            with Operators() as operators:
                step(*args, **kwargs)
            probe.counted.append(operators.count)

        probe.strategy.optimizer_step = counted
        return len(list(probe.actor.model.module.parameters()))

    group = Group(flags(tiny_model, "--ds.zero_stage", stage, *TRAINING[:4]), selective=True, float32=float32)
    call = group.workers[group.kind].async_run_method
    parameters = ray.get(call("call", watch))[0]
    assert not any(ray.get(call("call", lambda probe: probe.actor.model.tput_timer.config.synchronized)))
    group.run(experiences(seed=1), LOPTI)
    for counts in ray.get(call("call", lambda probe: probe.counted)):
        assert 0 < max(counts) <= most * parameters + 60
