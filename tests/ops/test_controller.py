"""The controller hands the statistics by probability to the trackers, and obeys requests to stop."""

from types import SimpleNamespace

import pytest
import wandb
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.ops import controller
from arlopti_openrlhf.ops.health import trackers
from arlopti_openrlhf.ops.health.alarms import Alarms
from arlopti_openrlhf.ops.health.divergence import BadSteps
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS


class Trainer(controller.Controller, ppo_trainer.BasePPOTrainer):
    """Upstream's trainer without models; `ppo_train` is what rank 0 would answer."""

    def __init__(self, tmp_path, logged: list) -> None:
        logger = SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run"), logging_steps=1)
        never = {"save_steps": float("inf"), "save_minutes": None, "load_enable": False}
        ckpt = SimpleNamespace(path=str(tmp_path / "ckpt"), **never)
        self.args = SimpleNamespace(logger=logger, ckpt=ckpt)
        self.token_statistics: dict = {}
        self.kl_ctl = FixedKLController(0.1)
        self.tensorboard_logger = trackers.ResumableTensorboard(self.args)
        self.alarms, self.bad_steps = Alarms(20, 10, 0.1), BadSteps(3, counts_refusals=True)
        self.wandb_logger = object.__new__(trackers.ResumableWandb)
        self.wandb_logger.handle = SimpleNamespace(log=logged.append, Histogram=wandb.Histogram)


def test_statistics_go_to_the_trackers_alone(tmp_path, monkeypatch):
    counts, norms = [0.0] * 48 + [3.0, 5.0], [2.0] + [0.0] * 49
    answer = {
        "policy_loss": 0.5,
        "tokens/p0.00-0.25/share": 0.1,
        **dict(zip(HISTOGRAMS, (counts, norms), strict=True)),
    }
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "ppo_train", lambda self, step: dict(answer))
    logged: list[dict] = []
    trainer = Trainer(tmp_path, logged)
    monkeypatch.setattr(controller.stopping, "stop_requested", lambda: None)
    trainer.resume({"global_step": 0})
    for step in (1, 2):
        status = trainer.ppo_train(step)
        assert status == {"policy_loss": 0.5}
        trainer.save_logs_and_checkpoints(step, status)
    trainer.tensorboard_logger.close()

    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"histograms": 0})
    events.Reload()
    assert [e.value for e in events.Scalars("train/tokens/p0.00-0.25/share")] == pytest.approx([0.1, 0.1])
    histogram = events.Histograms("train/tokens/probability")[1]
    assert histogram.step == 2 and histogram.histogram_value.num == 8
    filled = dict(zip(histogram.histogram_value.bucket_limit, histogram.histogram_value.bucket, strict=True))
    assert filled[1.0] == 5 and filled[0.98] == 3

    scalars, by_probability, by_norm = logged[:3]
    assert scalars["train/tokens/p0.00-0.25/share"] == 0.1 and scalars["train/global_step"] == 1
    assert list(by_probability["train/tokens/probability"].histogram) == counts
    assert list(by_norm["train/tokens/logit_grad_norm_by_probability"].histogram) == norms


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Return a trainer whose logs, and whose checkpoints, are lists of steps. `ask` is the request to stop."""
    monkeypatch.setattr(controller.stopping, "set_training", lambda: None)
    monkeypatch.setattr(controller.stopping, "stop_requested", lambda: trainer.ask)
    monkeypatch.setattr(controller.ray, "get", lambda refs: refs)
    trainer = Trainer(tmp_path, [])
    trainer.ask, trainer.saved, trainer.logged = None, [], []

    def save(method_name, tag, client_states, **metric):
        trainer.saved.append((tag, client_states["global_step"]))
        return []

    trainer.actor_model_group = SimpleNamespace(async_run_method=save)
    trainer.critic_model_group = trainer.wandb_logger = None
    trainer.best_eval_metric_key = trainer.best_eval_metric_value = trainer._latest_eval_metric_value = None
    trainer.tensorboard_logger = SimpleNamespace(log_train=lambda step, logs: trainer.logged.append(step))
    trainer.resume({"global_step": 4})
    return trainer


def test_a_request_to_stop_is_obeyed_with_a_checkpoint_of_the_last_step(saving):
    with pytest.raises(controller.stopping.Interrupted), saving.answering_signals():
        saving.save_logs_and_checkpoints(5, {}, {"global_step": 5})
        saving.ask = 15
        saving.save_logs_and_checkpoints(6, {}, {"global_step": 6})
    assert saving.saved == [("global_step6", 6)] and saving.logged == [5, 6]


def test_what_is_saved_is_not_saved_again(saving):
    """Nothing has been trained since the resume, or since the checkpoint that --ckpt.save_steps asks for."""
    with pytest.raises(controller.stopping.Interrupted), saving.answering_signals():
        raise controller.stopping.Interrupted(15)
    assert not saving.saved
    saving.args.ckpt.save_steps, saving.ask = 3, 15
    with pytest.raises(controller.stopping.Interrupted), saving.answering_signals():
        saving.save_logs_and_checkpoints(6, {}, {"global_step": 6})
    assert saving.saved == [("global_step6", 6)]


def test_a_checkpoint_every_some_minutes(saving, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(controller.time, "monotonic", lambda: now)
    saving.args.ckpt.save_minutes, saving.args.ckpt.save_steps, saving.saved_at = 1.0, 9, now
    for step in range(5, 12):  # a step takes 25 s
        now += 25
        saving.save_logs_and_checkpoints(step, {}, {"global_step": step})
    # The third step ends 75 s after the beginning. Step 9 is saved by --ckpt.save_steps, and time counts from there.
    assert saving.saved == [("global_step7", 7), ("global_step9", 9)]
