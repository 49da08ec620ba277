"""Logs a run to TensorBoard and wandb. A resumed run continues its curves, and a tracker that fails ends no run."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.terminal import say

_REACH = 30  # seconds in which wandb must have started the run on its server, instead of wandb's 90


@contextmanager
def resumable(args: argparse.Namespace, identify: Callable[[argparse.Namespace], str]) -> Iterator[None]:
    """Let upstream's trainer build these trackers.

    Args:
        args: upstream's, nested.
        identify: sets the run's name in them, and returns wandb's id for it.
    """
    if not (args.logger.wandb.key or args.logger.tensorboard_dir):
        yield
        return
    tensorboard = partial(Lenient, f"TensorBoard, {args.logger.tensorboard_dir}", ResumableTensorboard)
    wandb = partial(Lenient, "wandb", partial(ResumableWandb, run_id=identify(args)))
    with (
        replaced_attribute(ppo_trainer, "TensorboardLogger", tensorboard),
        replaced_attribute(ppo_trainer, "WandbLogger", wandb),
    ):
        yield


class Lenient:
    """A tracker that drops what it cannot log. It says so at the first time, and counts it until it is closed.

    Args:
        name: of the tracker, for messages.
        make: returns the tracker, from upstream's arguments. Without one, everything is dropped.
        args: upstream's, nested.
    """

    def __init__(self, name: str, make: Callable[[Any], Any], args: argparse.Namespace) -> None:
        self.name, self.lost = name, 0
        self._tracker: Any = None
        self._failure: Exception | None = None  # the first one
        self._has_just_failed = False
        try:
            self._tracker = make(args)
        except Exception as error:
            self._note(error)

    def log_train(self, step: int, logs: dict[str, Any]) -> None:
        self._call("log_train", step, logs)

    def log_eval(self, step: int, logs: dict[str, Any]) -> None:
        self._call("log_eval", step, logs)

    def log_histogram(self, name: str, weights: Sequence[float], step: int) -> None:
        self._call("log_histogram", name, weights, step)

    def drop_from(self, step: int) -> None:
        self._call("drop_from", step)

    def close(self) -> None:
        """Do nothing. Upstream closes the trackers after the last step, and another evaluation follows."""

    def close_for_good(self) -> None:
        self._call("close")
        if self._failure:
            say(f"{self.name}: {self.lost} entries are missing, since {self._failure}")

    def _call(self, method: str, *args: Any) -> None:
        if self._tracker:
            try:
                if self._has_just_failed:
                    self._tracker.reopen()
                getattr(self._tracker, method)(*args)
                self._has_just_failed = False
            except Exception as error:
                self._note(error)
        self.lost += self._has_just_failed and method.startswith("log_")

    def _note(self, error: Exception) -> None:
        if not self._failure:
            say(f"{self.name}: {type(error).__name__}: {error}. The run continues, and what is lost is counted.")
        self._failure, self._has_just_failed = self._failure or error, True


class ResumableTensorboard(TensorboardLogger):
    """`TensorboardLogger` that can drop the steps after a checkpoint, which the resumed run takes again."""

    writer: Any  # upstream's

    def drop_from(self, step: int) -> None:
        """Let TensorBoard drop what the folder holds from `step` on. The files keep it."""
        self.writer.close()
        self.reopen(purge_step=step)

    def reopen(self, purge_step: int | None = None) -> None:
        """Continue in another file, because a writer that has failed once always fails."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=self.writer.log_dir, purge_step=purge_step)

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        super().log_train(global_step, logs_dict)
        self.writer.flush()  # what cannot be written is known at once, and not two minutes later

    def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        super().log_eval(global_step, logs_dict)
        self.writer.flush()

    def log_histogram(self, name: str, weights: Sequence[float], step: int) -> None:
        """Log the weights of equal bins of [0, 1]."""
        edges = _edges(len(weights))
        centers = [(low + high) / 2 for low, high in pairwise(edges)]
        self.writer.add_histogram_raw(
            name,
            min=0.0,
            max=1.0,
            num=sum(weights),
            sum=sum(w * c for w, c in zip(weights, centers, strict=True)),
            sum_squares=sum(w * c * c for w, c in zip(weights, centers, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=weights,
            global_step=step,
        )
        self.writer.flush()


class ResumableWandb(WandbLogger):
    """`WandbLogger` with five changes.

    1. It continues the run `run_id` where there is one. The user's WANDB_RUN_ID comes first.
    2. The run's config is nested, so runs can be filtered by `algo.ar.alpha`. Of upstream's namespaces wandb
       keeps the text.
    3. Where wandb's server does not answer, or refuses the run, the run is kept on this machine.
    4. It logs histograms.
    5. Closing it ends wandb's own process, which Ray would kill before wandb asks it to end: a traceback.
    """

    handle: Any  # upstream's: the module wandb

    def __init__(self, args: argparse.Namespace, run_id: str) -> None:
        import wandb

        os.environ.setdefault("WANDB_RUN_ID", run_id)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_REACH))
        settings = wandb.setup().settings
        try:
            super().__init__(args)
        except Exception as error:
            if settings.mode != "online":
                raise
            wandb.teardown()  # or the run's id would be in use
            wandb.setup(settings=wandb.Settings(mode="offline"))
            super().__init__(args)
            problem, folder = f"{type(error).__name__}: {error}", self.handle.run.settings.sync_dir
            say(f"wandb: {settings.base_url}: {problem}. The run is kept here; send it later: wandb sync {folder}")
        self.handle.run.config.update(_nested(args), allow_val_change=True)

    def close(self) -> None:
        super().close()
        self.handle.teardown()

    def reopen(self) -> None:
        """Do nothing, because the next entry may be logged as it is."""

    def log_histogram(self, name: str, weights: Sequence[float], step: int) -> None:
        """Log the weights of equal bins of [0, 1] at the step that was logged last."""
        histogram = self.handle.Histogram(np_histogram=(weights, _edges(len(weights))))
        self.handle.log({name: histogram})


def _edges(bins: int) -> list[float]:
    return [i / bins for i in range(bins + 1)]


def _nested(arguments: SimpleNamespace | argparse.Namespace) -> dict[str, Any]:
    return {
        name: _nested(value) if isinstance(value, SimpleNamespace | argparse.Namespace) else value
        for name, value in vars(arguments).items()
    }
