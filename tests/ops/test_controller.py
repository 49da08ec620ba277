"""The controller logs, saves, stops and resumes a run."""

import logging
import math
import queue
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import wandb
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.cli.command_line import hierarchize
from arlopti_openrlhf.ops import controller
from arlopti_openrlhf.ops.checkpoints import files
from arlopti_openrlhf.ops.health import trackers
from arlopti_openrlhf.patching import plain_class
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS

Diverged, Interrupted = controller.stopping.Diverged, controller.stopping.Interrupted
GOOD = {"policy_loss": 0.5, "skipped_optimizer_steps": 0, "rollout/reward_mean": 1.0}
BAD = GOOD | {"policy_loss": math.nan, "skipped_optimizer_steps": 1}
fail = Mock(side_effect=OSError("no reward server"))


class Upstream(ppo_trainer.BasePPOTrainer):
    """Takes its arguments as upstream's two trainers do."""

    fit = None

    def __init__(self, pretrain, strategy, *groups) -> None:
        super().__init__(strategy, *groups)


def publish(folder: Path, *paths: str) -> None:
    for path in map(Path, paths):
        writing = folder / "ckpt" / path.parent / f"{files.WRITING}{path.name}"
        files.begin(writing, print)
        (writing / "model.pt").touch()
        files.publish(writing)


class Trainer(controller.Controller, Upstream):
    """A run without models. `saved` lists the checkpoints' names and states."""

    request: int | None = None  # to stop
    disk_is_full = False

    def __init__(self, folder: Path, *flags: str) -> None:
        flags = ("--actor.model_name_or_path", "m", "--ckpt.path", f"{folder}/ckpt", "--algo.kl.target", "1", *flags)
        args = hierarchize(train_ppo_ray.parse([*flags, "--logger.tensorboard_dir", str(folder)]))
        args.logger.wandb.run_name = "run"
        args.ckpt.save_steps = float("inf") if args.ckpt.save_steps == -1 else args.ckpt.save_steps
        super().__init__("m", SimpleNamespace(args=args), self, None, None, None, None, None)
        self.saved: list[tuple[str, dict]] = []
        self.parameter: str | None = None  # the first that is not finite, on rank 1
        self.token_statistics: dict = {}

    def async_run_method(self, method_name, tag=None, client_states=None, **metric):
        if method_name == "first_non_finite":
            return [None, self.parameter]
        if not self.disk_is_full:
            self.saved.append((tag, client_states))
            publish(Path(self.args.ckpt.path).parent, f"_actor/{tag}")
        return []

    def step(self, number: int, status: dict = GOOD) -> None:
        self.save_logs_and_checkpoints(number, status, {"global_step": number, "total_consumed_prompts": 8 * number})

    def names(self) -> list[str]:
        return [name for name, _ in self.saved]


@pytest.fixture
def train(tmp_path, monkeypatch, caplog):
    """Return train(flags), which returns a run at its step 4. What its models answer is there at once."""
    logging.getLogger("arlopti_openrlhf.ops.controller").addHandler(caplog.handler)
    monkeypatch.setattr(controller.ray, "get", lambda refs: refs)
    monkeypatch.setattr(controller.progress, "say", lambda name, value: None)
    monkeypatch.setattr(controller.stopping, "put", lambda name, value: None)

    def start(*flags: str) -> Trainer:
        trainer = Trainer(tmp_path, *flags)
        monkeypatch.setattr(controller.stopping, "stop_requested", lambda: trainer.request)
        trainer.resume({"global_step": 4})
        return trainer

    return start


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "run"), size_guidance={"scalars": 0, "histograms": 0})
    return found.Reload()


def test_statistics_go_to_the_trackers_alone(train, tmp_path, monkeypatch):
    counts, norms = [0.0] * 98 + [3.0, 5.0], [2.0] + [0.0] * 99
    answer = GOOD | {"tokens/p0.00-0.25/share": 0.1, **dict(zip(HISTOGRAMS, (counts, norms), strict=True))}
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "ppo_train", lambda self, step: dict(answer))
    trainer, logged = train(), list[dict]()
    trainer.wandb_logger = object.__new__(trackers.ResumableWandb)
    trainer.wandb_logger.handle = SimpleNamespace(log=logged.append, Histogram=wandb.Histogram)
    for step in (1, 2):
        status = trainer.ppo_train(step)
        assert status == GOOD
        trainer.step(step, status)

    found = events(tmp_path)
    assert [e.value for e in found.Scalars("train/tokens/p0.00-0.25/share")] == pytest.approx([0.1, 0.1])
    histogram = found.Histograms("train/tokens/probability")[1]
    assert histogram.step == 2 and histogram.histogram_value.num == 8
    filled = dict(zip(histogram.histogram_value.bucket_limit, histogram.histogram_value.bucket, strict=True))
    assert filled[1.0] == 5 and filled[0.99] == 3

    scalars, by_probability, by_norm = logged[:3]
    assert scalars["train/tokens/p0.00-0.25/share"] == 0.1 and scalars["train/global_step"] == 1
    assert list(by_probability["train/tokens/probability"].histogram) == counts
    assert list(by_norm["train/tokens/logit_grad_norm_by_probability"].histogram) == norms


def test_a_request_to_stop_is_obeyed_with_a_checkpoint_of_the_last_step(train, tmp_path):
    trainer = train()
    with pytest.raises(Interrupted), trainer.saving_last_step():
        trainer.step(5)
        trainer.request = 15
        trainer.step(6)
    [(name, states)] = trainer.saved
    assert name == "global_step6" and states["global_step"] == 6
    assert [e.step for e in events(tmp_path).Scalars("train/policy_loss")] == [5, 6]


def test_a_failure_between_two_steps_loses_none(train, monkeypatch, caplog):
    """Such as a reward server that stays away. Weights in the middle of a step are not saved."""
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "train_step", fail)
    for ends, cannot_save in ((fail, None), (fail, fail), (Trainer.train_step, None)):
        trainer = train()
        trainer.async_run_method = cannot_save or trainer.async_run_method
        with pytest.raises(OSError, match="no reward server"), trainer.saving_last_step():
            trainer.step(5)
            ends(trainer)
        assert trainer.names() == ["global_step5"] * (ends is fail and not cannot_save)
    assert caplog.text.count("no checkpoint of step 5 is saved: no reward server") == 1


def test_what_is_saved_is_not_saved_again(train):
    """Nothing has been trained since the resume, or since the checkpoint that --ckpt.save_steps asks for."""
    trainer = train("--ckpt.save_steps", "3")
    with pytest.raises(Interrupted), trainer.saving_last_step():
        raise Interrupted(15)
    assert not trainer.saved
    trainer.request = 15
    with pytest.raises(Interrupted), trainer.saving_last_step():
        trainer.step(6)
    assert trainer.names() == ["global_step6"]


def test_what_is_not_written_is_saved_later(train):
    """On a disk that is full, the strategy says so and raises nothing."""
    trainer = train("--ckpt.save_steps", "5")
    trainer.disk_is_full = True
    trainer.step(5)
    trainer.save_best_checkpoint({"accuracy": 0.9}, 5)
    trainer.disk_is_full = False
    trainer.save_best_checkpoint({"accuracy": 0.8}, 5)
    with pytest.raises(Interrupted), trainer.saving_last_step():
        raise Interrupted(15)
    assert trainer.names() == ["best_global_step5", "global_step5"]
    trainer = train("--ckpt.disable_ds", "--ckpt.save_hf")  # there are models alone, which no manifest lists
    trainer.disk_is_full = True
    trainer.save_best_checkpoint({"accuracy": 0.9}, 5)
    assert trainer.best_eval_metric_value == 0.9


def test_the_kl_coefficient_comes_back(train):
    trainer = train("--ckpt.save_steps", "2")
    trainer.kl_ctl.update(5.0, 10)
    trainer.step(6)
    trainer.save_best_checkpoint({"accuracy": 0.5}, 6, {"global_step": 6})
    assert len(trainer.saved) == 2
    for _, states in trainer.saved:
        assert states["global_step"] == 6 and len(str(states)) < 1000  # upstream prints it
        assert type(states["kl_coefficient"]) is float  # a class of NumPy's would not be unpickled
        resumed = train()
        resumed.resume(states)
        assert resumed.kl_ctl.value == trainer.kl_ctl.value > resumed.args.algo.kl.init_coef
        fixed = train()
        fixed.args.algo.kl.target = None
        fixed.resume(states)
        assert fixed.kl_ctl.value == fixed.args.algo.kl.init_coef


def test_a_kl_that_is_not_finite_leaves_the_coefficient(train, monkeypatch):
    trainer = train()
    before = trainer.kl_ctl.value
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "train_step", lambda self, kl, _: self.kl_ctl.update(kl, 512))
    trainer.train_step(float("nan"), 5)
    assert trainer.kl_ctl.value == before
    trainer.train_step(5.0, 6)
    assert trainer.kl_ctl.value != before


def test_a_frozen_policy_is_not_trained_later_on_what_it_has_missed(train, monkeypatch):
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "ppo_train", lambda self, step: dict(GOOD))
    trainer, actor = train("--critic.freezing_steps", "2"), Mock()
    handler = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda do: do(actor)))
    trainer.actor_model_group = SimpleNamespace(_actor_handlers=[handler])
    for step in range(5):
        trainer.ppo_train(step)
    assert actor.trainer.replay_buffer.clear.call_count == 3


def test_a_bad_step_is_logged_and_not_saved(train, tmp_path):
    trainer = train("--ckpt.save_steps", "1")
    for step, status in enumerate([GOOD, BAD, BAD, GOOD], start=5):
        trainer.step(step, status)
        trainer.save_best_checkpoint({"accuracy": float(step)}, step, {})
        if status is BAD:
            trainer.save_last_step()  # as before the run obeys a request to stop
    trainer.args.ckpt.disable_ds, trainer.last_step = True, 9
    trainer.save_last_step()  # there is nothing to save
    assert trainer.names() == ["global_step5", "best_global_step5", "global_step8", "best_global_step8"]
    assert [e.value for e in events(tmp_path).Scalars("train/alarm/skipped_steps")] == [0, 1, 1, 0]
    assert trainer.args.ckpt.save_steps == 1


@pytest.mark.parametrize(
    ("parameter", "weights"), [("lm_head.weight", "first in lm_head.weight"), (None, "the weights are finite")]
)
def test_too_many_bad_steps_stop_the_run(train, tmp_path, parameter, weights):
    trainer = train("--ckpt.save_steps", "1")
    # Beside this run's step 3 are a later step of an earlier run, a torn checkpoint and one half written.
    publish(tmp_path, "_actor/global_step9", "_actor/global_step1")
    for tag in ("best_global_step1", f"{files.WRITING}global_step12"):
        (tmp_path / "ckpt" / "_actor" / tag).mkdir()
    trainer.parameter = parameter
    for step, status in enumerate([BAD, BAD, GOOD, BAD, BAD], start=1):
        trainer.step(step, status)
    with pytest.raises(Diverged, match="3 bad steps in a row") as stop:
        trainer.step(6, BAD)
    assert trainer.names() == ["global_step3"]
    message = str(stop.value)
    assert weights in message and "step 6: policy_loss is nan, 1 optimizer steps refused" in message
    assert "step 4: " in message and "step 2: " not in message
    assert message.endswith(f"Last good checkpoint: {tmp_path}/ckpt/_actor/global_step3")


def test_a_checkpoint_to_go_back_to_has_both_parts(train, tmp_path):
    trainer = train()
    assert trainer._diagnosis().endswith("Last good checkpoint: none")
    publish(tmp_path, "_actor/global_step1", "_critic/global_step1", "_actor/global_step2")
    assert trainer._diagnosis().endswith("_actor/global_step2")
    trainer.args.critic.model_name_or_path = "c"
    assert trainer._diagnosis().endswith("_actor/global_step1")


def test_the_best_checkpoint_has_the_highest_accuracy_or_score(train):
    """A judge whose first scores happen to be all 1 has an accuracy at first."""
    trainer = train()
    for step, accuracy in ((0, 0.9), (10, 0.3), (20, 0.2), (30, 0.4)):
        trainer.save_best_checkpoint({"accuracy": accuracy, "eval_kk_pass1": -accuracy}, step)
        assert trainer.evaluated_step == step
    assert trainer.names() == ["best_global_step10", "best_global_step30"]
    trainer = train()
    trainer.save_best_checkpoint({"accuracy": 1.0, "eval_judge_pass1": 1.0}, 10)
    trainer.save_best_checkpoint({"eval_judge_pass1": 3.5}, 20)
    assert trainer.names() == ["best_global_step10", "best_global_step20"]


@pytest.mark.parametrize(("asked", "saved"), [("", 1), ("aime/accuracy", 1), ("judge/score", 0), ("none", 0)])
def test_a_resumed_run_may_be_asked_for_another_best_metric(asked, saved, train):
    trainer = train("--ckpt.best_metric_key", asked)
    trainer.restore_best_checkpoint_state({"best_eval_metric_key": "judge/score", "best_eval_metric_value": 3.5})
    trainer.save_best_checkpoint({"accuracy": 0.5, "aime/accuracy": 0.1, "judge/score": 3.4}, 10)
    assert len(trainer.saved) == saved


class Training(controller.TrainingActor, plain_class(ppo_trainer_async.TrainingActor)):
    """Upstream's loop of asynchronous training. A step makes the weights one more, which a checkpoint notes."""

    weights = 0

    def init_checkpoint_states(self) -> dict:
        return {"global_step": 0}

    def train_step(self, samples, step: int) -> tuple[dict, int]:
        self.weights += 1
        return GOOD | {"rollout/num_samples": 8, "rollout/response_length_mean": 4}, step + 1

    def async_run_method(self, method_name, tag="final", **states):
        self.saved.append((tag, self.weights))
        publish(Path(self.args.ckpt.path).parent, f"_actor/{tag}")
        return []


def test_asynchronous_training_saves_the_weights_that_it_evaluated(train, monkeypatch):
    """The samples of all steps are there already, so nothing else keeps it from training on meanwhile."""
    trainer, lock = object.__new__(Training), SimpleNamespace(remote=lambda: None)
    vars(trainer).update(vars(train("--ckpt.save_steps", "1")), actor_model_group=trainer)
    trainer.args.eval.steps, trainer.vllm_lock = 1, SimpleNamespace(acquire=lock, release=lock)
    evaluator = SimpleNamespace(evaluate=lambda **kwargs: {"accuracy": float(trainer.weights == 2)})
    monkeypatch.setattr(controller, "SamplesGenerator", lambda *args, **kwargs: evaluator)
    trainer.prepare_evaluation(([], {}))
    trainer.rollout_queue, trainer.rollout_slots = queue.Queue(), queue.Queue()
    for _ in range(3):
        trainer.rollout_queue.put((["sample"], {"total_consumed_prompts": 8}, None, 1.0))
    trainer.rollout_queue.put("done")
    trainer.fit()
    trainer.finish()
    steps = ["global_step1", "best_global_step1", "global_step2", "best_global_step2", "global_step3"]
    assert trainer.saved == list(zip(steps, (1, 1, 2, 2, 3), strict=True))

    trainer.last_step, trainer.evaluate = 4, fail  # --ckpt.save_steps asks for none of it
    with pytest.raises(OSError):
        trainer.finish()
    assert trainer.saved[-2:] == [("final", 3), ("global_step4", 3)]
    trainer.last_step = 5
    trainer.leave()  # the other actor has failed
    assert trainer.saved[-1] == ("global_step5", 3)


def test_a_metric_key_that_does_not_exist_is_refused_before_the_first_step(train):
    metrics = {"accuracy": 1.0, "aime/accuracy": 1.0}
    for key in ("none", "aime/accuracy"):
        train("--ckpt.best_metric_key", key).save_best_checkpoint(metrics, 0)
    with pytest.raises(ValueError, match="--ckpt.best_metric_key: aime/acc is none of .*: accuracy, aime/accuracy"):
        train("--ckpt.best_metric_key", "aime/acc").save_best_checkpoint(metrics, 0)
    trainer = train()
    trainer.save_best_checkpoint({"accuracy": 1.0}, 0)
    trainer.save_best_checkpoint({"eval_kk_pass1": 1.0}, 10)  # later, nothing stops a run


def test_a_run_without_a_step_is_refused_at_its_end(train):
    trainer = train("--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0.1", "0.9")
    controller._refuse_without_a_step(trainer)  # it was resumed at step 4
    trainer.last_step = 0
    with pytest.raises(
        controller.stopping.NothingTrained, match=r"left out every .* no mean score is in \(0.1, 0.9\)"
    ):
        controller._refuse_without_a_step(trainer)


@pytest.mark.parametrize(("error", "saved"), [(OSError(), ["save_model"]), (Interrupted(15), [])])
def test_a_failing_last_evaluation_does_not_lose_the_model(error, saved, train):
    """A run that is stopped has no final model."""
    trainer, called = train(), []
    trainer.args.eval.steps, trainer.eval_dataloader, trainer.generate_kwargs, trainer.evaluate = (
        9,
        [],
        {},
        Mock(side_effect=error),
    )
    trainer.async_run_method = lambda method_name: called.append(method_name) or []
    with pytest.raises(type(error)):
        trainer.evaluate_last()
    assert called == saved
