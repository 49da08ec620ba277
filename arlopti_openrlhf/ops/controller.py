"""Leads a run in place of OpenRLHF's single controller.

It evaluates before the first step and after the last too, chooses the best checkpoint by accuracy, logs histograms,
makes experience with `ops.rollouts.experience_maker`, and answers requests to stop (`ops.lifecycle.stopping`) with a
checkpoint.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.utils.logging_utils import init_logger
from ray.util.queue import Full

from arlopti_openrlhf.ops.checkpoints.resuming import ResumableTrainer
from arlopti_openrlhf.ops.health.health import WatchedTrainer
from arlopti_openrlhf.ops.lifecycle import awake, credentials, progress, stopping
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker
from arlopti_openrlhf.ops.rollouts.lora_reference import ReferenceInPolicy
from arlopti_openrlhf.patching import plain_class, replaced_attribute

logger = init_logger(__name__)


def install() -> None:
    """Put these trainers in place of OpenRLHF's. Call it on the driver, before the CLI's `train` imports them.

    Ray pickles them, and upstream's below them, by value, with their modules' globals as they are on the driver.
    """
    ppo_trainer.PPOTrainer = PPOTrainer
    ppo_trainer_async.PPOTrainerAsync = PPOTrainerAsync
    ppo_trainer_async.GenerateSamplesActor = GenerateSamplesActor
    ppo_trainer_async.TrainingActor = TrainingActor


class Controller(WatchedTrainer, ResumableTrainer):
    """Changes what upstream's two trainers share.

    1. `ExperienceMaker` makes the experience.
    2. The best checkpoint has the highest accuracy.
    3. The trackers stay open for an evaluation after the last step.
    4. The trackers, and not the console, get the statistics by probability. A list in the status is a histogram.
    5. A checkpoint is saved every `--ckpt.save_minutes` too, and before the run obeys a request to stop.
    6. It says how far the run is (`ops.lifecycle.progress`).
    """

    last_step = 0
    last_client_states: dict | None = None
    saved_step = 0
    saved_at: float  # time.monotonic() of the last checkpoint, in seconds
    evaluated_step: int | None = None
    best_eval_metric_key: str | None  # upstream's

    def __init__(self, *args, **kwargs) -> None:
        credentials.receive()  # the trackers are built next
        super().__init__(*args, **kwargs)
        # Ray pickles `BasePPOTrainer` by name, so its constructor would not see a class rebound on the driver.
        self.experience_maker = ExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self._reference(),
            self.kl_ctl,
            self.strategy,
            self.tokenizer,
        )

    def _reference(self) -> Any:
        """Return what computes the reference's log-probs, or None where nothing needs them."""
        if self.reference_model_group is None and self.args.algo.kl.init_coef > 0:
            return ReferenceInPolicy(self.actor_model_group)
        return self.reference_model_group

    def ppo_train(self, global_steps: int) -> dict:
        """Return upstream's status, without the statistics by probability, which are kept for the trackers."""
        status = super().ppo_train(global_steps)
        self.token_statistics = {name: status.pop(name) for name in list(status) if name.startswith("tokens/")}
        return status

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        """Log and save as upstream does, and log the statistics by probability too.

        Raises:
            Interrupted: a request to stop has come.
        """
        self.last_step, self.last_client_states = global_step, dict(client_states or {})
        if logs_dict and client_states:
            progress.say_step(global_step, client_states["total_consumed_prompts"], logs_dict)
        histograms = {name: value for name, value in self.token_statistics.items() if isinstance(value, list)}
        scalars = {name: value for name, value in self.token_statistics.items() if name not in histograms}
        super().save_logs_and_checkpoints(global_step, (logs_dict or {}) | scalars, client_states)
        if global_step % self.args.logger.logging_steps == 0:
            for name, counts in histograms.items():
                for tracker in self._trackers():
                    tracker.log_histogram(f"train/{name}", counts, global_step)
        if global_step % self.args.ckpt.save_steps == 0 and not self.bad_steps.is_bad:
            self.saved_step, self.saved_at = global_step, time.monotonic()
        minutes = self.args.ckpt.save_minutes
        if minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes:
            self.save_last_step()
        self.obey()

    def obey(self) -> None:
        """Raise `Interrupted` if a request to stop has come."""
        if signum := stopping.stop_requested():
            raise stopping.Interrupted(signum)

    def save_last_step(self) -> None:
        """Save the last step as upstream does every `--ckpt.save_steps`, unless that is done or the step is bad."""
        if self.last_step == self.saved_step or self.bad_steps.is_bad:
            return
        with replaced_attribute(self.args.ckpt, "save_steps", 1):
            with replaced_attribute(self.args.logger, "logging_steps", float("inf")):
                super().save_logs_and_checkpoints(self.last_step, None, self.last_client_states)
        self.saved_step, self.saved_at = self.last_step, time.monotonic()
        logger.info(f"Saved a checkpoint of step {self.last_step}: {self.args.ckpt.path}")

    def save_best_checkpoint(self, eval_metrics, global_step: int, client_states=None) -> None:
        """Save as upstream does after each evaluation. Before the first step there is nothing to save.

        Raises:
            ValueError: the evaluation before the first step lacks the user's metric. Upstream would save no best
                checkpoint, and not say so.
        """
        self.evaluated_step = global_step
        progress.say_evaluation(global_step, eval_metrics)
        if global_step:
            super().save_best_checkpoint(eval_metrics, global_step, client_states)
            return
        key = self.args.ckpt.best_metric_key
        if key not in ("", "none", *eval_metrics):
            raise ValueError(
                f"argument --ckpt.best_metric_key: {key} is none of the evaluation's metrics: "
                f"{', '.join(sorted(eval_metrics))}"
            )

    def _detect_eval_metric_key(self, eval_metrics) -> str | None:
        """Return upstream's choice, with `accuracy` as the default."""
        if not self.best_eval_metric_key and "accuracy" in eval_metrics:
            self.best_eval_metric_key = "accuracy"
        return super()._detect_eval_metric_key(eval_metrics)

    def resume(self, checkpoint_states: dict) -> None:
        """Take the last step from a checkpoint, or from the states of a new run."""
        super().resume(checkpoint_states)
        self.last_step, self.last_client_states = checkpoint_states["global_step"], dict(checkpoint_states)
        self.saved_step, self.saved_at = self.last_step, time.monotonic()

    @contextmanager
    def answering_signals(self) -> Iterator[None]:
        """Save a checkpoint of the last step where a request to stop ends what runs inside."""
        stopping.set_training()
        try:
            yield
        except stopping.Interrupted:
            self.save_last_step()
            raise

    def close_trackers(self) -> None:
        for tracker in self._trackers():
            tracker.close()

    @contextmanager
    def _saving_the_model(self) -> Iterator[None]:
        """Save the trained model if what runs inside fails. Upstream saves it only at the very end."""
        try:
            yield
        except Exception:
            ray.get(self.actor_model_group.async_run_method(method_name="save_model"))
            raise

    def _trackers(self) -> list:
        return [tracker for tracker in (self.wandb_logger, self.tensorboard_logger) if tracker]

    def _with_open_trackers(self, fit, *args) -> None:
        """Run upstream's `fit`, and keep the trackers open that it closes at its end."""
        with ExitStack() as stack:
            for tracker in self._trackers():
                stack.enter_context(replaced_attribute(tracker, "close", lambda: None))
            fit(*args)


# The classes behind upstream's Ray actors.
_PPOTrainer: Any = plain_class(ppo_trainer.PPOTrainer)
_GenerateSamplesActor: Any = plain_class(ppo_trainer_async.GenerateSamplesActor)
_TrainingActor: Any = plain_class(ppo_trainer_async.TrainingActor)
_PPOTrainerAsync: Any = plain_class(ppo_trainer_async.PPOTrainerAsync)


@ray.remote
class PPOTrainer(Controller, _PPOTrainer):
    """`PPOTrainer` with the changes of its bases. It also evaluates before the first step and after the last."""

    def fit(self, global_step: int = 0) -> None:
        evaluates = self.eval_dataloader is not None and self.args.eval.steps != float("inf")
        try:
            self.resume(self.init_checkpoint_states())
            drawn = (self.last_client_states or {}).get("total_consumed_prompts", 0)
            progress.say_prompts(len(self.prompts_dataloader) * self.args.train.num_episodes, drawn)
            with self.answering_signals():
                if evaluates and not self.last_step:
                    self.save_best_checkpoint(self.evaluate(0, **self._eval_kwargs()), 0)
                self._with_open_trackers(super().fit, global_step)
                if evaluates and self.evaluated_step != self.last_step:
                    with self._saving_the_model():
                        logs = self.evaluate(self.last_step, **self._eval_kwargs())
                        self.save_best_checkpoint(logs, self.last_step, self.last_client_states)
        finally:
            self.close_trackers()

    def _eval_kwargs(self) -> dict:
        return self.generate_kwargs | {"n_samples_per_prompt": self.args.eval.n_samples_per_prompt}


@ray.remote
class GenerateSamplesActor(_GenerateSamplesActor):
    """`GenerateSamplesActor` that also evaluates before the first step, and on request."""

    is_resumed = False

    def load_state_dict(self, state_dict) -> None:
        self.is_resumed = True
        super().load_state_dict(state_dict)

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """Generate as upstream does, from an episode on, and after so many prompts of all episodes."""
        progress.say_prompts(len(self.prompts_dataloader) * self.args.train.num_episodes, total_consumed_prompts)
        super().fit(episode, total_consumed_prompts)

    def evaluates(self) -> bool:
        return self.eval_dataloader is not None and self.args.eval.steps != float("inf")

    def _should_eval(self, global_step: int) -> bool:
        is_first = global_step == 0 and self._last_eval_step < 0 and not self.is_resumed
        return (is_first and self.evaluates()) or super()._should_eval(global_step)

    def evaluate(self) -> dict[str, float]:
        return self._run_eval()


@ray.remote
class TrainingActor(Controller, _TrainingActor):
    """`TrainingActor` with the changes of `Controller`. Its trackers stay open until `finish`."""

    def fit(self, global_step: int = 0) -> None:
        try:
            self.resume(self.init_checkpoint_states())
            with self.answering_signals():
                self._with_open_trackers(super().fit, global_step)
                self.obey()  # the generator may have done so first
        except Exception:
            self.close_trackers()
            raise

    def step_to_evaluate(self) -> int | None:
        """Return the last step, or None if it has been evaluated."""
        return None if self.evaluated_step == self.last_step else self.last_step

    def finish(self, generator=None) -> None:
        """Evaluate the last step if there is a `GenerateSamplesActor` to do it, and close the trackers."""
        try:
            if generator is not None:
                with self._saving_the_model():
                    eval_metrics = ray.get(generator.evaluate.remote())
                    logger.info(f"Eval at step {self.last_step}: {eval_metrics}")
                    for tracker in self._trackers():
                        tracker.log_eval(self.last_step, eval_metrics)
                    self.save_best_checkpoint(eval_metrics, self.last_step, self.last_client_states)
        finally:
            self.close_trackers()


@ray.remote
class PPOTrainerAsync(_PPOTrainerAsync):
    """`PPOTrainerAsync` that also evaluates after the last step. Where it fails, the trackers are closed."""

    def __init__(self, pretrain, strategy, *args, **kwargs) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.seconds = 60 * strategy.args.train.stall_minutes

    def fit(self) -> None:
        try:
            super().fit()
        except Exception:
            self._end_training()
            raise
        evaluates = ray.get(self.generator_actor.evaluates.remote())
        step = ray.get(self.trainer_actor.step_to_evaluate.remote())
        ray.get(self.trainer_actor.finish.remote(self.generator_actor if evaluates and step is not None else None))

    def _end_training(self) -> None:
        """Let the training actor end its `fit`, in which it may wait for samples that will not come, and tidy up."""
        closed = self.trainer_actor.close_trackers.remote()

        def has_ended(seconds: float) -> bool:
            try:
                self.rollout_queue.put_nowait("done")
            except Full:
                pass
            return bool(ray.wait([closed], timeout=seconds)[0])

        awake.succeeds(has_ended, self.seconds)
