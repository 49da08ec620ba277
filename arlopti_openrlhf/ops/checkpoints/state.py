"""Saves and restores the parts of a rank's state that neither DeepSpeed nor upstream saves.

What is in no checkpoint starts anew, such as the medians of the alarms and vLLM's caches.
"""

import argparse
import json
import random
import re
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.checkpoints import files, ranks
from arlopti_openrlhf.ops.lifecycle.progress import RUN_FILE, kept_run

_UPSTREAMS_DEFAULT = re.compile(r"ppo_\d{4}T\d\d:\d\d")  # holds the time at which the command started
RANK_FILE = "process_rank_{}.pt"
_load = partial(torch.load, weights_only=True, map_location="cpu", mmap=True)


def save(checkpoint: Path, strategy: Any) -> None:
    """Write this rank's file to a checkpoint's folder, which is being written.

    It has the random numbers of Python, NumPy, PyTorch and the GPU, upstream's counters of the moving average
    (--train.enable_ema), and the average, or this rank's part of it.

    Args:
        checkpoint: the folder.
        strategy: the rank's `CheckpointStrategy`.
    """
    averaged = strategy.averaged
    is_writer = averaged is not None and _writer(averaged) == dist.get_rank()
    own = {
        "random": random_state(),
        "time_steps": dict(strategy.time_steps),
        "averaged": _memory(averaged) if is_writer else None,  # all ranks may hold the whole of it
    }
    torch.save(own, checkpoint / RANK_FILE.format(dist.get_rank()))


def restore(checkpoint: Path, strategy: Any, model: nn.Module) -> None:
    """Restore what `save` wrote. A moving average that is not there starts at the checkpoint's weights.

    Args:
        model: has them.

    Raises:
        ValueError: the checkpoint's moving average is that of another model.
    """
    saved = _load(checkpoint / RANK_FILE.format(dist.get_rank()))
    if strategy.averaged is not None:
        own, writer = _memory(strategy.averaged), _writer(strategy.averaged)
        path = checkpoint / RANK_FILE.format(writer)
        if writer != dist.get_rank():
            saved["averaged"] = _load(path)["averaged"]
        if saved["averaged"] is None:
            begin_average(strategy, model)
        elif [tensor.shape for tensor in saved["averaged"]] != [tensor.shape for tensor in own]:
            raise ValueError(f"{path}: the moving average (--train.enable_ema) is that of another model")
        else:
            for tensor, value in zip(own, saved["averaged"], strict=True):
                tensor.copy_(value)
    set_random_state(saved["random"])
    strategy.time_steps.update(saved["time_steps"])


def begin_average(strategy: Any, model: nn.Module) -> None:
    """Let the moving average, if there is one, start at a model's weights, and not at those before its training."""
    if strategy.averaged is not None:
        ranks.say("the checkpoint holds no moving average (--train.enable_ema): it starts at the checkpoint's weights")
        for tensor, weight in zip(_memory(strategy.averaged), _memory(model), strict=True):
            tensor.copy_(weight)


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's generators, and of this process's GPU where it has one."""
    legacy: Any = np.random.get_state()  # (generator's name, key, ...)
    return {
        "python": random.getstate(),
        "numpy": (legacy[0], legacy[1].tolist(), *legacy[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` returned. Without a GPU, a GPU's state is left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _writer(averaged: nn.Module) -> int:
    """Return the rank that writes what this rank holds of the moving average: its own part under ZeRO-3."""
    is_partitioned = any(hasattr(parameter, "ds_tensor") for parameter in averaged.parameters())
    return dist.get_rank() if is_partitioned else 0


def _memory(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters' own memory: with ZeRO-3 this rank's part of each, else the whole."""
    return [getattr(parameter, "ds_tensor", parameter.data).detach() for parameter in model.parameters()]


def identify(args: argparse.Namespace) -> str:
    """Set the run's name and return wandb's id for it.

    Both are kept next to the checkpoints, where the run saves some. With `--ckpt.load_enable` the name is the kept
    one, unless the user gives another. The id belongs to the name.
    """
    path, given = Path(args.ckpt.path, RUN_FILE), args.logger.wandb.run_name
    if args.ckpt.load_enable and path.exists():
        kept = kept_run(path.parent)
        if kept is None:
            terminal.say(f"{path} cannot be read: the run's name and its id with wandb are new ones.")
        elif given == kept["run_name"] or _UPSTREAMS_DEFAULT.fullmatch(given):
            args.logger.wandb.run_name = kept["run_name"]
            return kept["wandb_id"]
    run = {"run_name": given, "wandb_id": secrets.token_hex(4)}
    try:
        if files.are_saved(args):  # else what is kept there may be another run's
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, json.dumps(run))
    except OSError as error:
        terminal.say(f"{path}: {error.strerror}. A run that is resumed from here will have curves of its own.")
    return run["wandb_id"]
