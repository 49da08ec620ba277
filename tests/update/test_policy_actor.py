"""The policy's actor refuses what would fail after the first rollout."""

from types import SimpleNamespace

import pytest

from arlopti_openrlhf import cpu
from arlopti_openrlhf.update.policy_actor import PolicyActor

Plain = PolicyActor.__ray_metadata__.modified_class.__ray_actor_class__


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
    given = []
    upstream = Plain.__mro__[1]
    monkeypatch.setattr(upstream, "init_model_from_pretrained", lambda self, *args: given.append(args))
    monkeypatch.setattr(cpu, "uses_cpu", lambda: on_cpu)
    vllm, ds = SimpleNamespace(sync_backend=backend), SimpleNamespace(attn_implementation=attention)
    strategy = SimpleNamespace(args=SimpleNamespace(vllm=vllm, ds=ds))
    actor = object.__new__(Plain)
    if refusal is None:
        actor.init_model_from_pretrained(strategy, "model", 10, engines)
        assert given == [(strategy, "model", 10, engines)]
    else:
        with pytest.raises(ValueError, match=refusal):
            actor.init_model_from_pretrained(strategy, "model", 10, engines)
