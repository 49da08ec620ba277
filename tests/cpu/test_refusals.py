"""The policy's actor refuses what would fail after the first rollout."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from openrlhf.trainer.ray import ppo_actor

from arlopti_openrlhf import bindings, cpu
from arlopti_openrlhf.cpu import refusals
from arlopti_openrlhf.patching import plain_class


@pytest.mark.parametrize(
    ("on_cpu", "backend", "attention", "engines", "refusal"),
    [
        (True, "nccl", "sdpa", ["engine"], "--vllm.sync_backend nccl: .*; give gloo"),
        (True, "nccl", "sdpa", None, None),
        (True, "gloo", "sdpa", ["engine"], None),
        (True, "gloo", "flex_attention", ["engine"], "--ds.attn_implementation flex_attention: .*; give sdpa"),
        (False, "nccl", "flex_attention", ["engine"], None),
    ],
)
def test_flags_fit_the_machine(monkeypatch, on_cpu, backend, attention, engines, refusal):
    monkeypatch.setattr(cpu, "uses_cpu", lambda: on_cpu)
    vllm, ds = SimpleNamespace(sync_backend=backend), SimpleNamespace(attn_implementation=attention)
    args = SimpleNamespace(vllm=vllm, ds=ds)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        refusals.check(args, syncs=bool(engines))


def test_the_policys_actors_check(monkeypatch):
    """With the arguments of upstream's `init_model_from_pretrained`, which get through unchanged."""
    given = []
    upstream = ppo_actor.PolicyModelActor
    monkeypatch.setattr(ppo_actor, "PolicyModelActor", upstream)  # back, afterwards
    monkeypatch.setattr(plain_class(upstream), "init_model_from_pretrained", lambda self, *args: given.append(args))
    monkeypatch.setattr(refusals, "check", lambda args, syncs: given.append((args, syncs)))
    bindings.put(row for row in bindings.TABLE if row.ours == "cpu.refusals:PolicyActor")
    actor = object.__new__(plain_class(ppo_actor.PolicyModelActor))
    strategy = SimpleNamespace(args="args")
    actor.init_model_from_pretrained(strategy, "model", 10, ["engine"])
    assert given == [("args", True), (strategy, "model", 10, ["engine"])]
