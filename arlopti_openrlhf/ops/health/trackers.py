"""Logs a run to TensorBoard and wandb. A resumed run continues its curves, and no tracker ends a run."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.terminal import say


@contextmanager
def resumable(run_id: str) -> Iterator[None]:
    """Let upstream's trainer build these trackers, for the run with this id of wandb's. None is built that fails."""
    with (
        replaced_attribute(ppo_trainer, "TensorboardLogger", partial(_started, "TensorBoard", ResumableTensorboard)),
        replaced_attribute(ppo_trainer, "WandbLogger", partial(_started, "wandb", partial(ResumableWandb, run_id))),
    ):
        yield


def _started(name: str, tracker: Callable[[Any], Any], args: Any) -> "Guarded | None":
    try:
        return Guarded(name, tracker(args))
    except Exception as error:
        say(f"{name} cannot start, and the run goes on without it: {type(error).__name__}: {error}")
        return None


class Guarded:
    """A tracker none of whose errors reaches its caller. The first one switches it off, with one line."""

    def __init__(self, name: str, tracker: Any) -> None:
        self._name, self._tracker = name, tracker

    def close(self) -> None:
        """Do nothing. Upstream closes a tracker after the last step, and another evaluation follows."""

    def close_for_good(self) -> None:
        self._call("close")

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(self._call, method)

    def _call(self, method: str, *args: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*args)
        except Exception as error:
            self._tracker = None
            say(f"{self._name} has failed, and the run goes on without it: {type(error).__name__}: {error}")


class ResumableTensorboard(TensorboardLogger):
    """`TensorboardLogger` that can drop the steps after a checkpoint, which the resumed run takes again."""

    writer: Any  # upstream's

    def drop_from(self, step: int) -> None:
        """Let TensorBoard drop what the folder holds from `step` on. The files keep it."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer.close()
        self.writer = SummaryWriter(log_dir=self.writer.log_dir, purge_step=step)

    def flush(self) -> None:
        self.writer.flush()

    def log_histogram(self, name: str, weights: list[float], edges: np.ndarray, step: int) -> None:
        centers = (edges[1:] + edges[:-1]) / 2
        moments = {"num": sum(weights), "sum": weights @ centers, "sum_squares": weights @ centers**2}
        bins = {"bucket_limits": edges[1:].tolist(), "bucket_counts": weights}
        self.writer.add_histogram_raw(name, min=edges[0], max=edges[-1], **moments, **bins, global_step=step)


class ResumableWandb(WandbLogger):
    """`WandbLogger` of one run, unless WANDB_RUN_ID names another. Its config can be filtered by `algo.ar.alpha`."""

    def __init__(self, run_id: str, args: Any) -> None:
        os.environ.setdefault("WANDB_RUN_ID", run_id)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")  # seconds; else an outage holds up the run's end
        super().__init__(args)
        # Upstream's x-axis of evaluations, `eval/epoch`, is logged nowhere.
        self.handle.define_metric("eval/*", step_metric="eval/global_step", step_sync=True, overwrite=True)
        nested = json.loads(json.dumps(args, default=vars))  # of upstream's namespaces wandb keeps the text
        self.handle.run.config.update(nested, allow_val_change=True)

    def log_histogram(self, name: str, weights: list[float], edges: np.ndarray, step: int) -> None:
        self.handle.log({name: self.handle.Histogram(np_histogram=(weights, edges))})  # at the step logged last

    def close(self) -> None:
        super().close()
        self.handle.teardown()  # Ray would kill wandb's process, which writes a traceback then
