"""Looks at each step's figures: alarms go to the trackers and the log, and a run that has diverged is stopped."""

from contextlib import ExitStack
from pathlib import Path

import ray
from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.ops.checkpoints.files import newest_published
from arlopti_openrlhf.ops.health.alarms import Alarms, rollout_figures
from arlopti_openrlhf.ops.health.divergence import BadSteps
from arlopti_openrlhf.ops.lifecycle.stopping import Diverged
from arlopti_openrlhf.patching import replaced_attribute

logger = init_logger(__name__)


class WatchedTrainer(ppo_trainer.BasePPOTrainer):
    """`BasePPOTrainer` with three changes.

    1. The trackers get the alarms (`ops.health.alarms`). The log gets a line when one begins and when it ends.
    2. No checkpoint is saved after a bad step (`ops.health.divergence`), and `--train.max_bad_steps` in a
       row stop the run.
    3. The statistics of the rollout batch also hold what the alarms look at.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        alarm = self.args.alarm
        self.alarms = Alarms(alarm.flat_reward_steps, alarm.grad_norm_factor, alarm.rollout_gap)
        self.bad_steps = BadSteps(self.args.train.max_bad_steps, counts_refusals=self.args.ds.param_dtype != "fp16")

    def _compute_rollout_stats(self, experiences) -> dict:
        group_size = self.args.rollout.n_samples_per_prompt
        return super()._compute_rollout_stats(experiences) | rollout_figures(experiences, group_size)

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        """Log and save as upstream does, with the alarms; a bad step is logged alone.

        Raises:
            Diverged: too many bad steps in a row.
        """
        alarms: dict[str, float] = {}
        if logs_dict:  # else it has been logged, and is to be saved
            alarms, lines = self.alarms.check(logs_dict)
            for line in lines:
                logger.warning(f"step {global_step}: {line}")
            if cause := self.bad_steps.add(global_step, logs_dict):
                logger.warning(f"{cause}. No checkpoint is saved after this step.")
        with ExitStack() as stack:
            if self.bad_steps.is_bad:
                stack.enter_context(replaced_attribute(self.args.ckpt, "save_steps", float("inf")))
            super().save_logs_and_checkpoints(global_step, (logs_dict or {}) | alarms, client_states)
        if self.bad_steps.are_too_many:
            raise Diverged(self._diagnosis())

    def save_best_checkpoint(self, eval_metrics, global_step: int, client_states=None) -> None:
        """Save as upstream does, but not after a bad step."""
        if not self.bad_steps.is_bad:
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    def _diagnosis(self) -> str:
        """Return the last steps' causes, the first parameter that is not finite, and the checkpoint to go back to."""
        parameters = ray.get(self.actor_model_group.async_run_method(method_name="first_non_finite"))
        parameter = next(filter(None, parameters), None)
        weights = f"the weights are not finite, first in {parameter}" if parameter else "the weights are finite"
        parts = ("_actor", "_critic") if self.critic_model_group else ("_actor",)
        folders = [Path(self.args.ckpt.path, part) for part in parts]
        newest = newest_published(folders)
        return (
            f"{len(self.bad_steps.causes)} bad steps in a row (--train.max_bad_steps): "
            f"{'; '.join(self.bad_steps.causes)}. Now {weights}. "
            f"Last good checkpoint: {folders[0] / newest if newest else 'none'}"
        )
