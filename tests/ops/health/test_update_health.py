"""What is logged of an update in addition to its own metrics, by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from arlopti_openrlhf.ops.health.update_health import ActorPPOTrainer


@pytest.fixture
def status(monkeypatch):
    """Return the status of an update on two ranks that have the same samples, in which a step is refused."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))

    class Upstream:
        def ppo_train(self, kl_ctl):
            self.actor.model.skipped_steps += 1
            return {"policy_loss": kl_ctl}

    class Trainer(ActorPPOTrainer, Upstream):
        pass

    def of(*samples):
        trainer = Trainer()
        trainer.actor = SimpleNamespace(model=SimpleNamespace(skipped_steps=3))
        trainer.replay_buffer = SimpleNamespace(items=samples)
        trainer.strategy = SimpleNamespace(ds_device_mesh={"dp": SimpleNamespace(get_group=lambda: None)})
        return trainer.ppo_train(0.5)

    return of


def test_the_gap_is_over_the_response_tokens_that_both_know(status):
    """|-1 - -1.5| and |-2 - -1|; then a token nobody asked vLLM about, one that was not trained on, and one of the
    prompt. The other sample's engine was not asked."""
    asked = SimpleNamespace(
        action_log_probs=torch.tensor([-1.0, -2.0, -3.0, torch.nan, -4.0]),
        rollout_log_probs=torch.tensor([-1.5, -1.0, torch.nan, -3.0, -9.0]),
        action_mask=torch.tensor([1, 1, 1, 1, 0]),
    )
    other = SimpleNamespace(rollout_log_probs=None)
    found = {"policy_loss": 0.5, "skipped_optimizer_steps": 1}
    assert status(asked, other) == found | {"rollout/gap": 0.75}
    assert status(other) == found
