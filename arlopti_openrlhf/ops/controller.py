"""Leads a run in place of OpenRLHF's single controller, in synchronous and in asynchronous training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import init_logger
from ray.util.queue import Full
from transformers import set_seed

from arlopti_openrlhf.ops.checkpoints import state
from arlopti_openrlhf.ops.checkpoints.files import are_saved, is_published, newest_of
from arlopti_openrlhf.ops.health import alarms, trackers
from arlopti_openrlhf.ops.lifecycle import credentials, progress, stopping
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker
from arlopti_openrlhf.ops.rollouts.samples import SamplesGenerator
from arlopti_openrlhf.patching import Upstream, replaced_attribute

logger = init_logger(__name__)


class Controller(ppo_trainer.BasePPOTrainer):
    """Changes what upstream's two trainers share.

    1. `ExperienceMaker` makes the experience.
    2. A resumed run takes up the coefficient that `--algo.kl.target` moves, and the trackers' curves.
    3. The trackers get the alarms (`ops.health.alarms`), and the log a line when one begins and when it ends.
    4. No checkpoint is saved after a bad step, and `--train.max_bad_steps` in a row stop the run.
    5. The trackers, and not the console, get the statistics by probability. A list in the status is a histogram.
    6. A checkpoint of the last step is saved where a request to stop, or a failure between two steps, ends the run.
    7. The best checkpoint has the highest accuracy.
    8. It reports how far the run is (`ops.lifecycle.progress`).
    """

    last_step = 0
    last_client_states: dict | None = None
    saved_step = 0
    is_in_step = False  # the weights are those of no step
    evaluated_step: int | None = None
    best_eval_metric_key: str | None  # upstream's
    best_eval_metric_value: float  # upstream's
    eval_dataloader: Any  # upstream's, or batches. None without --eval.dataset
    generate_kwargs: dict[str, Any]  # upstream's, of the generation

    def __init__(self, pretrain, strategy, *args, **kwargs) -> None:
        set_seed(strategy.args.train.seed)  # upstream seeds the models' processes alone
        credentials.receive()  # the trackers are built next
        # Ray pickles `BasePPOTrainer` by name, so its constructor would not see a class rebound on the driver.
        with replaced_attribute(ppo_trainer, "RemoteExperienceMaker", ExperienceMaker):
            with trackers.resumable(state.identify(strategy.args)):
                super().__init__(pretrain, strategy, *args, **kwargs)
        self.alarms = alarms.Alarms(self.args)
        self.bad_steps: list[str] = []  # what was bad about each of the last steps in a row

    def resume(self, checkpoint_states: dict) -> None:
        """Take up the state of a checkpoint, or of a new run, which holds only counters. Call it before any step."""
        step = checkpoint_states["global_step"]
        if self.args.algo.kl.target:  # else it is what the user gives now
            self.kl_ctl.value = checkpoint_states.get("kl_coefficient", self.kl_ctl.value)
        if self.tensorboard_logger and self.args.ckpt.load_enable:
            self.tensorboard_logger.drop_from(step + 1 if step else 0)  # step 0 is evaluated again
        self.last_step, self.last_client_states = step, dict(checkpoint_states)
        self.saved_step = step

    def _state(self) -> dict:
        """Return what `resume` takes up, besides upstream's states."""
        return {"kl_coefficient": float(self.kl_ctl.value)}  # upstream's may be NumPy's, which is no plain number

    def _compute_rollout_stats(self, experiences) -> dict:
        group_size = self.args.rollout.n_samples_per_prompt
        return super()._compute_rollout_stats(experiences) | alarms.rollout_figures(experiences, group_size)

    def train_step(self, *args, **kwargs) -> Any:
        """Take upstream's step. A KL that is not finite leaves the coefficient, as no later one could mend it."""
        coefficient, self.is_in_step = self.kl_ctl.value, True
        result = super().train_step(*args, **kwargs)
        if not np.isfinite(self.kl_ctl.value):
            self.kl_ctl.value = coefficient
        return result

    def ppo_train(self, global_steps: int) -> dict:
        """Return upstream's status, without the statistics by probability, which are kept for the trackers."""
        progress.say("phase", progress.Phase("update"))
        status = super().ppo_train(global_steps)
        if global_steps <= self.args.critic.freezing_steps:  # upstream would train the policy on all of them later
            calls = [actor.__ray_call__ for actor in self.actor_model_group._actor_handlers]
            ray.get([call.remote(lambda actor: actor.trainer.replay_buffer.clear()) for call in calls])
        self.token_statistics = {name: status.pop(name) for name in list(status) if name.startswith("tokens/")}
        return status

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: dict, client_states: dict) -> None:
        """Log and save after a step as upstream does, with the alarms and the statistics by probability.

        Raises:
            Diverged: too many bad steps in a row.
            Interrupted: a request to stop has come.
        """
        self.last_step, self.last_client_states = global_step, dict(client_states)
        figures = progress.figures(logs_dict)
        progress.say("step", progress.Step(global_step, client_states["total_consumed_prompts"], figures))
        alarm_metrics, lines = self.alarms.check(logs_dict)
        for line in lines:
            logger.warning(f"step {global_step}: {line}")
        if bad := alarms.what_is_bad(logs_dict, counts_refusals=self.args.ds.param_dtype != "fp16"):
            self.bad_steps.append(f"step {global_step}: {bad}")
            logger.warning(f"{self.bad_steps[-1]}. No checkpoint is saved after this step.")
        else:
            self.bad_steps = []

        histograms = {name: value for name, value in self.token_statistics.items() if isinstance(value, list)}
        scalars = {name: value for name, value in self.token_statistics.items() if name not in histograms}
        save_steps = float("inf") if bad else self.args.ckpt.save_steps
        with replaced_attribute(self.args.ckpt, "save_steps", save_steps):
            logs = logs_dict | scalars | alarm_metrics
            super().save_logs_and_checkpoints(global_step, logs, client_states | self._state())
        if global_step % self.args.logger.logging_steps == 0:
            for name, weights in histograms.items():
                edges = np.linspace(0, 1, len(weights) + 1)
                for tracker in self._trackers():
                    tracker.log_histogram(f"train/{name}", weights, edges, global_step)
            if self.tensorboard_logger:  # or a kill would lose steps that no resumed run takes again
                self.tensorboard_logger.flush()

        if len(self.bad_steps) >= self.args.train.max_bad_steps:
            raise stopping.Diverged(self._diagnosis())
        if global_step % save_steps == 0 and is_published(self.args, f"global_step{global_step}"):
            self.saved_step = global_step
        self.is_in_step = False
        stopping.obey()

    def save_last_step(self) -> None:
        """Save the last step, unless that is done, it is bad, or another has begun. If it fails, a line says why."""
        if self.is_in_step or self.last_step == self.saved_step or self.bad_steps or not are_saved(self.args):
            return
        states = (self.last_client_states or {}) | self._state()
        try:
            with replaced_attribute(self.args.ckpt, "save_steps", 1):
                with replaced_attribute(self.args.logger, "logging_steps", float("inf")):
                    super().save_logs_and_checkpoints(self.last_step, None, states)
        except Exception as error:  # the run ends for a reason of its own
            logger.warning(f"no checkpoint of step {self.last_step} is saved: {error}")
        if is_published(self.args, f"global_step{self.last_step}"):
            self.saved_step = self.last_step
            logger.info(f"Saved a checkpoint of step {self.last_step}: {self.args.ckpt.path}")

    def _diagnosis(self) -> str:
        """Return the bad steps, the first parameter that is not finite, and the checkpoint to go back to."""
        parameters = ray.get(self.actor_model_group.async_run_method(method_name="first_non_finite"))
        parameter = next(filter(None, parameters), None)
        weights = f"the weights are not finite, first in {parameter}" if parameter else "the weights are finite"
        return (
            f"{len(self.bad_steps)} bad steps in a row (--train.max_bad_steps): {'; '.join(self.bad_steps)}. "
            f"Now {weights}. Last good checkpoint: {newest_of(self.args) or 'none'}"
        )

    def save_best_checkpoint(self, eval_metrics, global_step: int, client_states=None) -> None:
        """Save as upstream does after each evaluation. There is nothing to save before the first step or a bad one.

        Raises:
            ValueError: the evaluation before the first step lacks the user's metric. Upstream would save no best
                checkpoint, and not say so.
        """
        self.evaluated_step = global_step
        for name in ("first", "last"):
            progress.say(name, progress.Evaluation(global_step, dict(eval_metrics)))
        key = self.args.ckpt.best_metric_key
        if not global_step and key not in ("", "none", *eval_metrics):
            raise ValueError(
                f"argument --ckpt.best_metric_key: {key} is none of the evaluation's metrics: "
                f"{', '.join(sorted(eval_metrics))}"
            )
        if global_step and not self.bad_steps:
            best = self.best_eval_metric_value
            super().save_best_checkpoint(eval_metrics, global_step, (client_states or {}) | self._state())
            if self.best_eval_metric_value != best and not is_published(self.args, f"best_global_step{global_step}"):
                self.best_eval_metric_value = best

    def evaluate_and_save(self, step: int) -> None:
        """Evaluate a step if that is asked for and not done, and save its weights if they are the best."""
        if self.eval_dataloader is None or self.args.eval.steps == float("inf") or self.evaluated_step == step:
            return
        samples = self.args.eval.n_samples_per_prompt
        metrics = self.evaluate(step, **self.generate_kwargs | {"n_samples_per_prompt": samples})
        self.save_best_checkpoint(metrics, step, self.last_client_states)

    def evaluate_last(self) -> None:
        """Evaluate the last step. If that fails, save the trained model, as upstream does only at the very end."""
        try:
            self.evaluate_and_save(self.last_step)
        except Exception as error:
            if not isinstance(error, stopping.RunStopped):
                ray.get(self.actor_model_group.async_run_method(method_name="save_model"))
            raise

    def _detect_eval_metric_key(self, eval_metrics) -> str | None:
        """Return upstream's choice, with `accuracy` as the default. Values of another metric are not compared."""
        before, asked = self.best_eval_metric_key, self.args.ckpt.best_metric_key  # a checkpoint may have the former
        self.best_eval_metric_key = asked or ("accuracy" if "accuracy" in eval_metrics else "")  # scores may have none
        key = super()._detect_eval_metric_key(eval_metrics)
        if before and key and key != before:
            self.best_eval_metric_value = float("-inf")
        return key

    @contextmanager
    def saving_last_step(self) -> Iterator[None]:
        """Answer requests to stop. Save a checkpoint of the last step if one, or a failure, ends what runs inside."""
        stopping.set_training()
        try:
            yield
        except Exception:
            stopping.put("saving", "1")
            self.save_last_step()
            raise

    def _trackers(self) -> list[Any]:
        return [tracker for tracker in (self.wandb_logger, self.tensorboard_logger) if tracker]

    def close_trackers(self) -> None:
        for tracker in self._trackers():
            tracker.close_for_good()


def _refuse_without_a_step(trainer: Any) -> None:
    """Call this after the last prompt.

    Raises:
        NothingTrained: no step was trained. Upstream would save the model as it came.
    """
    if trainer.last_step:
        return
    low, high = trainer.args.algo.dynamic_filtering_range
    raise stopping.NothingTrained(
        f"no step was trained: dynamic filtering left out every prompt, as no mean score is in ({low:g}, {high:g}) "
        "(--algo.dynamic_filtering_range), or too few remain for all ranks. The log has the scores. No model is saved."
    )


class PPOTrainer(Controller):
    """`PPOTrainer` with the changes of `Controller`. It also evaluates before the first step and after the last."""

    def fit(self, global_step: int = 0) -> None:
        try:
            self.resume(self.init_checkpoint_states())
            drawn = (self.last_client_states or {}).get("total_consumed_prompts", 0)
            total = len(self.prompts_dataloader) * self.args.train.num_episodes
            progress.say("prompts", progress.Prompts(total, drawn))
            with self.saving_last_step():
                if not self.last_step:
                    self.evaluate_and_save(0)
                super().fit(global_step)
                _refuse_without_a_step(self)
                self.evaluate_last()
        finally:
            self.close_trackers()


class GenerateSamplesActor(Upstream):
    """`GenerateSamplesActor` that evaluates nothing. While it did, the training actor would train the next step."""

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """Generate as upstream does, from an episode on, and after so many prompts of all episodes."""
        total = len(self.prompts_dataloader) * self.args.train.num_episodes
        progress.say("prompts", progress.Prompts(total, total_consumed_prompts))
        super().fit(episode, total_consumed_prompts)

    def _should_eval(self, global_step: int) -> bool:
        return False

    def evaluation(self) -> tuple[list[tuple] | None, dict[str, Any]]:
        """Return the batches to evaluate on, if there are some, and upstream's arguments of the generation."""
        return None if self.eval_dataloader is None else list(self.eval_dataloader), self.generate_kwargs


class TrainingActor(Controller):
    """`TrainingActor` with the changes of `Controller`. Its trackers stay open until `finish` or `leave`.

    It evaluates, too, between two steps: so the weights that are saved as the best are those that were evaluated.
    """

    evaluation_seconds = 0.0  # after the last step

    def prepare_evaluation(self, evaluation: tuple[list[tuple] | None, dict[str, Any]]) -> None:
        """Take what `GenerateSamplesActor.evaluation` has returned. Call it before `fit`."""
        self.eval_dataloader, self.generate_kwargs = evaluation
        common = self.strategy, None, self.eval_dataloader, self.tokenizer, self.vllm_engines
        self.samples_generator = SamplesGenerator(*common, sampling=self.args.eval.sampling)

    def fit(self, global_step: int = 0) -> None:
        self.resume(self.init_checkpoint_states())
        with self.saving_last_step():
            if not self.last_step:
                self.evaluate_and_save(0)
            super().fit(global_step)
            _refuse_without_a_step(self)

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: dict, client_states: dict) -> None:
        """Log and save after a step, and evaluate every `--eval.steps`. The next step's time is without that."""
        logs_dict["timing/step_total"] -= self.evaluation_seconds
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        start = time.monotonic()
        if global_step % self.args.eval.steps == 0:
            self.evaluate_and_save(global_step)
        self.evaluation_seconds = time.monotonic() - start

    def evaluate(self, global_step: int, **generate_kwargs) -> dict[str, float]:
        """Evaluate vLLM's weights, which are the last step's, while no samples are generated. Return the metrics."""
        ray.get(self.vllm_lock.acquire.remote())
        try:
            metrics = self.samples_generator.evaluate(**generate_kwargs)
        finally:
            ray.get(self.vllm_lock.release.remote())
        logger.info(f"Eval at step {global_step}: {metrics}")
        for tracker in self._trackers():
            tracker.log_eval(global_step, metrics)
        return metrics

    def finish(self) -> None:
        """Evaluate the last step if that is not done, and close the trackers."""
        with self.saving_last_step():
            self.evaluate_last()
        self.close_trackers()

    def leave(self) -> None:
        """Save the last step and close the trackers. Something has ended the run, perhaps in another process."""
        self.save_last_step()
        self.close_trackers()


class PPOTrainerAsync(Upstream):
    """`PPOTrainerAsync` that also evaluates after the last step. If it fails, the last step is saved."""

    def __init__(self, pretrain, strategy, *args, **kwargs) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.seconds = 60 * strategy.args.train.stall_minutes

    def fit(self) -> None:
        try:
            ray.get(self.trainer_actor.prepare_evaluation.remote(self.generator_actor.evaluation.remote()))
            super().fit()
            ray.get(self.trainer_actor.finish.remote())
        except Exception:
            self._end_training()
            raise

    def _end_training(self) -> None:
        """Let the training actor end its `fit`, in which it may wait for samples that will not come, and tidy up."""
        stopping.put("saving", "1")
        left, deadline = self.trainer_actor.leave.remote(), time.monotonic() + self.seconds
        while time.monotonic() < deadline and not ray.wait([left], timeout=1.0)[0]:
            with suppress(Full):
                self.rollout_queue.put_nowait("done")
