"""The policy's actor refuses what would fail after the first rollout."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from openrlhf.trainer.ray import ppo_actor

from arlopti_openrlhf import bindings, cpu
from arlopti_openrlhf.cpu import refusals
from arlopti_openrlhf.patching import plain_class


@pytest.mark.parametrize(
    ("on_cpu", "backend", "attention", "liger", "engines", "refusal"),
    [
        (True, "nccl", "sdpa", False, ["engine"], "--vllm.sync_backend nccl: .*; give gloo"),
        (True, "nccl", "sdpa", False, None, None),
        (True, "gloo", "sdpa", False, ["engine"], None),
        (True, "gloo", "flex_attention", False, ["engine"], "--ds.attn_implementation flex_attention: .*; give sdpa"),
        (True, "gloo", "sdpa", True, ["engine"], "--ds.use_liger_kernel True: .*; leave it out"),
        (False, "nccl", "flex_attention", True, ["engine"], None),
    ],
)
def test_flags_fit_the_machine(monkeypatch, on_cpu, backend, attention, liger, engines, refusal):
    monkeypatch.setattr(cpu, "uses_cpu", lambda: on_cpu)
    ds = SimpleNamespace(attn_implementation=attention, use_liger_kernel=liger)
    args = SimpleNamespace(vllm=SimpleNamespace(sync_backend=backend), ds=ds)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        refusals.check(args, syncs=bool(engines))


def test_the_policys_actors_check(monkeypatch):
    """With the arguments of upstream's `init_model_from_pretrained`, which get through unchanged."""
    given = []
    upstream = ppo_actor.PolicyModelActor
    monkeypatch.setattr(ppo_actor, "PolicyModelActor", upstream)  # back, afterwards
    monkeypatch.setattr(plain_class(upstream), "init_model_from_pretrained", lambda self, *args: given.append(args))
    monkeypatch.setattr(refusals, "check", lambda args, syncs: given.append((args, syncs)))
    bindings.put(row for row in bindings.TABLE if row.ours == "cpu.refusals:CpuPolicyActor")
    actor = object.__new__(plain_class(ppo_actor.PolicyModelActor))
    strategy = SimpleNamespace(args="args")
    actor.init_model_from_pretrained(strategy, "model", 10, ["engine"])
    assert given == [("args", True), (strategy, "model", 10, ["engine"])]
