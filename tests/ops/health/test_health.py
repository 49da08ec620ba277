"""A trainer logs its alarms, saves nothing after a bad step, and stops after too many."""

import math
from types import SimpleNamespace

import pytest
import ray

from arlopti_openrlhf.ops.checkpoints import files
from arlopti_openrlhf.ops.health import health
from arlopti_openrlhf.ops.health.alarms import Alarms
from arlopti_openrlhf.ops.health.divergence import BadSteps
from arlopti_openrlhf.ops.lifecycle.stopping import Diverged

GOOD = {"policy_loss": 0.1, "skipped_optimizer_steps": 0}
BAD = {"policy_loss": math.nan, "skipped_optimizer_steps": 1}


class Trainer(health.WatchedTrainer):
    """Upstream's trainer whose models, trackers and checkpoints are lists."""

    def __init__(self, folder, parameter: str | None) -> None:
        self.args = SimpleNamespace(
            ckpt=SimpleNamespace(save_steps=1, path=str(folder)), logger=SimpleNamespace(logging_steps=1)
        )
        self.alarms, self.bad_steps = Alarms(20, 10, 0.1), BadSteps(3, counts_refusals=True)
        self.logged: list[tuple[int, dict]] = []
        self.saved: list[str] = []
        self.wandb_logger = None
        self.tensorboard_logger = SimpleNamespace(log_train=lambda step, logs: self.logged.append((step, logs)))
        self.critic_model_group = None
        self.best_eval_metric_key, self.best_eval_metric_value = "accuracy", float("-inf")
        self._latest_eval_metric_value = None
        answers = {"save_checkpoint": self._save, "first_non_finite": lambda: [None, parameter]}
        self.actor_model_group = SimpleNamespace(
            async_run_method=lambda method_name, **kwargs: answers[method_name](**kwargs)
        )

    def _save(self, tag: str, **ignored) -> list:
        self.saved.append(tag)
        return []


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda answers: answers)


def test_a_bad_step_is_logged_and_not_saved(tmp_path):
    trainer = Trainer(tmp_path, None)
    for step, status in enumerate([GOOD, BAD, BAD, GOOD], start=1):
        trainer.save_logs_and_checkpoints(step, status, {})
        trainer.save_best_checkpoint({"accuracy": float(step)}, step, {})
    assert trainer.saved == ["global_step1", "best_global_step1", "global_step4", "best_global_step4"]
    assert [logs["alarm/skipped_steps"] for _, logs in trainer.logged] == [0, 1, 1, 0]
    assert trainer.args.ckpt.save_steps == 1


@pytest.mark.parametrize(
    ("parameter", "weights"), [("lm_head.weight", "first in lm_head.weight"), (None, "the weights are finite")]
)
def test_too_many_bad_steps_stop_the_run(tmp_path, parameter, weights):
    # This run has saved step 1. Beside it are a later step of an earlier run, a torn checkpoint and one half written.
    for tag in ("global_step9", "global_step1"):
        writing = tmp_path / "_actor" / f"{files.WRITING}{tag}"
        files.begin(writing, print)
        files.publish(writing, {})
    for tag in ("best_global_step1", f"{files.WRITING}global_step12"):
        (tmp_path / "_actor" / tag).mkdir()
    trainer = Trainer(tmp_path, parameter)
    trainer.save_logs_and_checkpoints(1, GOOD, {})
    trainer.save_logs_and_checkpoints(2, BAD, {})
    trainer.save_logs_and_checkpoints(2, None, {})  # asked to save what it has logged
    trainer.save_logs_and_checkpoints(3, BAD, {})
    with pytest.raises(Diverged) as stop:
        trainer.save_logs_and_checkpoints(4, BAD, {})
    assert trainer.saved == ["global_step1"] and [step for step, _ in trainer.logged] == [1, 2, 2, 3, 4]
    message = str(stop.value)
    assert weights in message and "step 4: policy_loss is nan, 1 optimizer steps refused" in message
    assert message.endswith(f"Last good checkpoint: {tmp_path / '_actor' / 'global_step1'}")


def test_a_checkpoint_to_go_back_to_has_both_parts(tmp_path):
    trainer = Trainer(tmp_path, None)
    trainer.bad_steps.add(1, BAD)
    assert trainer._diagnosis().endswith("Last good checkpoint: none")
    for part, tag in [("_actor", "global_step1"), ("_critic", "global_step1"), ("_actor", "global_step2")]:
        writing = tmp_path / part / f"{files.WRITING}{tag}"
        files.begin(writing, print)
        files.publish(writing, {})
    assert trainer._diagnosis().endswith("_actor/global_step2")
    trainer.critic_model_group = trainer.actor_model_group
    assert trainer._diagnosis().endswith("_actor/global_step1")
