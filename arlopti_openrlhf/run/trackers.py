"""Lets a resumed run go on in the curves that it has left, in TensorBoard and in wandb."""

import argparse
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from arlopti_openrlhf.forward.selective_actor import replaced_attribute

RUN_FILE = "run.json"  # in --ckpt.path
_UPSTREAMS_DEFAULT = re.compile(r"ppo_\d{4}T\d\d:\d\d")  # holds the time at which the command started


@contextmanager
def resumable(args: argparse.Namespace) -> Iterator[None]:
    """Let upstream's trainer build these trackers, under the name and the id that the run had before.

    Args:
        args: upstream's, nested. The run's name in them is set.
    """
    if not (args.logger.wandb.key or args.logger.tensorboard_dir):
        yield
        return
    wandb = partial(ResumableWandb, run_id=identify(args))
    with (
        replaced_attribute(ppo_trainer, "TensorboardLogger", ResumableTensorboard),
        replaced_attribute(ppo_trainer, "WandbLogger", wandb),
    ):
        yield


def identify(args: argparse.Namespace) -> str:
    """Set the run's name and return wandb's id for it.

    Both are kept beside the checkpoints. With `--ckpt.load_enable` the name is the kept one, unless the user gives
    another. The id belongs to the name.
    """
    path, given = Path(args.ckpt.path, RUN_FILE), args.logger.wandb.run_name
    if args.ckpt.load_enable and path.exists():
        kept = json.loads(path.read_text("utf-8"))
        if given == kept["run_name"] or _UPSTREAMS_DEFAULT.fullmatch(given):
            args.logger.wandb.run_name = kept["run_name"]
            return kept["wandb_id"]
    run = {"run_name": given, "wandb_id": secrets.token_hex(4)}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(run), "utf-8")
    beside.rename(path)
    return run["wandb_id"]


class ResumableTensorboard(TensorboardLogger):
    """`TensorboardLogger` that can drop the steps after a checkpoint, which the resumed run takes again."""

    writer: Any  # upstream's

    def drop_from(self, step: int) -> None:
        """Let TensorBoard drop what the folder holds from `step` on. The files keep it."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer.close()
        self.writer = SummaryWriter(log_dir=self.writer.log_dir, purge_step=step)


class ResumableWandb(WandbLogger):
    """`WandbLogger` with two changes.

    1. It goes on in the run `run_id` where there is one. The user's WANDB_RUN_ID comes first.
    2. The run's config is nested, so that runs can be filtered by `algo.ar.alpha`. Of upstream's namespaces wandb
       keeps the text.
    """

    handle: Any  # upstream's: the module wandb

    def __init__(self, args: argparse.Namespace, run_id: str) -> None:
        os.environ.setdefault("WANDB_RUN_ID", run_id)
        os.environ.setdefault("WANDB_RESUME", "allow")
        super().__init__(args)
        self.handle.run.config.update(_nested(args), allow_val_change=True)


def _nested(arguments: SimpleNamespace | argparse.Namespace) -> dict[str, Any]:
    return {
        name: _nested(value) if isinstance(value, SimpleNamespace | argparse.Namespace) else value
        for name, value in vars(arguments).items()
    }
