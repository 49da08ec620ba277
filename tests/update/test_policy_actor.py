"""The policy's actor refuses what would fail after the first rollout."""

from types import SimpleNamespace

import pytest

from arlopti_openrlhf import cpu
from arlopti_openrlhf.update.policy_actor import PolicyActor

Plain = PolicyActor.__ray_metadata__.modified_class.__ray_actor_class__


@pytest.mark.parametrize(
    ("on_cpu", "backend", "engines", "starts"),
    [
        (True, "nccl", ["engine"], False),
        (True, "nccl", None, True),
        (True, "gloo", ["engine"], True),
        (False, "nccl", ["engine"], True),
    ],
)
def test_the_sync_backend_fits_the_machine(monkeypatch, on_cpu, backend, engines, starts):
    given = []
    upstream = Plain.__mro__[1]
    monkeypatch.setattr(upstream, "init_model_from_pretrained", lambda self, *args: given.append(args))
    monkeypatch.setattr(cpu, "uses_cpu", lambda: on_cpu)
    strategy = SimpleNamespace(args=SimpleNamespace(vllm=SimpleNamespace(sync_backend=backend)))
    actor = object.__new__(Plain)
    if starts:
        actor.init_model_from_pretrained(strategy, "model", 10, engines)
        assert given == [(strategy, "model", 10, engines)]
    else:
        with pytest.raises(ValueError, match="--vllm.sync_backend nccl: .*; give gloo"):
            actor.init_model_from_pretrained(strategy, "model", 10, engines)
