"""The controller's state goes into every checkpoint and comes back out of it."""

import random
from types import SimpleNamespace

import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

from arlopti_openrlhf.ops.checkpoints.resuming import ResumableTrainer


class Trainer(ResumableTrainer, ppo_trainer.BasePPOTrainer):
    """Upstream's trainer with an actor group that keeps the states it is to save."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(ckpt=SimpleNamespace(save_steps=2), logger=SimpleNamespace(logging_steps=9))
        self.kl_ctl = AdaptiveKLController(0.1, 1.0, 100)
        self.tensorboard_logger = self.critic_model_group = None
        self.best_eval_metric_key, self.best_eval_metric_value, self._latest_eval_metric_value = "accuracy", 0.0, None
        self.actor_model_group, self.saved = self, []

    def async_run_method(self, method_name, tag, client_states, **kwargs):
        self.saved.append(client_states)
        return []


def test_kl_coefficient_and_random_numbers_come_back(monkeypatch):
    monkeypatch.setattr(ppo_trainer.ray, "get", lambda answers: answers)
    trainer = Trainer()
    trainer.kl_ctl.update(5.0, 10)
    trainer.save_logs_and_checkpoints(2, {}, {"global_step": 2})
    trainer.save_best_checkpoint({"accuracy": 0.5}, 2, {"global_step": 2})
    expected = random.random(), torch.rand(())
    assert len(trainer.saved) == 2
    for states in trainer.saved:
        assert states["global_step"] == 2 and len(str(states)) < 1000  # upstream prints it
        random.seed(1)
        torch.manual_seed(1)
        resumed = Trainer()
        resumed.resume(states)
        assert resumed.kl_ctl.value == trainer.kl_ctl.value > 0.1
        assert (random.random(), torch.rand(())) == expected
