"""Saves the controller's state in the checkpoints and takes it up again."""

import pickle

import torch
from openrlhf.trainer import ppo_trainer
from transformers import set_seed

from arlopti_openrlhf.ops.checkpoints import process_state
from arlopti_openrlhf.ops.health import trackers


class ResumableTrainer(ppo_trainer.BasePPOTrainer):
    """What upstream's two trainers share, with a state that a resumed run takes up.

    Upstream keeps the step, the prompts and the best metric. This adds the KL coefficient, the random numbers and the
    trackers' curves.
    """

    def __init__(self, pretrain, strategy, *args, **kwargs) -> None:
        set_seed(strategy.args.train.seed)  # upstream seeds the models' processes alone
        with trackers.resumable(strategy.args):
            super().__init__(pretrain, strategy, *args, **kwargs)

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        super().save_logs_and_checkpoints(global_step, logs_dict, (client_states or {}) | self._state())

    def save_best_checkpoint(self, eval_metrics, global_step: int, client_states=None) -> None:
        super().save_best_checkpoint(eval_metrics, global_step, (client_states or {}) | self._state())

    def _state(self) -> dict:
        numbers = bytearray(pickle.dumps(process_state.random_state()))
        # Upstream prints the state, and a long tensor is printed short.
        return {
            "kl_coefficient": self.kl_ctl.value,
            "controller_random": torch.frombuffer(numbers, dtype=torch.uint8),
        }

    def resume(self, checkpoint_states: dict) -> None:
        """Take up the state of a checkpoint, before the first step. That of a run's beginning holds only counters."""
        if "controller_random" in checkpoint_states:
            self.kl_ctl.value = checkpoint_states["kl_coefficient"]
            numbers = checkpoint_states["controller_random"].numpy().tobytes()
            process_state.set_random_state(pickle.loads(numbers))
        if self.tensorboard_logger and self.args.ckpt.load_enable:
            step = checkpoint_states["global_step"]
            self.tensorboard_logger.drop_from(step + 1 if step else 0)  # step 0 is evaluated again
