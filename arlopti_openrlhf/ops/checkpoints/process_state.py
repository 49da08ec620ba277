"""What a process holds besides the model and its optimizer, and what a resumed run needs to be the same run."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from arlopti_openrlhf.ops.checkpoints.rank_agreement import say


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's generators, and of this process's GPU where it has one."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
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


def save(folder: Path, time_steps: dict[str, int], averaged: nn.Module | None) -> None:
    """Write this rank's state to a checkpoint's folder.

    Args:
        folder: the checkpoint, which is being written.
        time_steps: upstream's counters of the moving average.
        averaged: the moving average, or None. Where all ranks hold the whole of it, rank 0 writes it.
    """
    rank = dist.get_rank()
    memory = _memory(averaged) if averaged is not None and _writer(averaged) == rank else None
    torch.save({"random": random_state(), "time_steps": dict(time_steps), "averaged": memory}, _path(folder, rank))


def restore(folder: Path, time_steps: dict[str, int], averaged: nn.Module | None) -> None:
    """Restore what `save` wrote, with the same arguments. Where there was no moving average, a line says so.

    Raises:
        ValueError: the checkpoint's moving average is that of another model.
    """
    state = torch.load(_path(folder, dist.get_rank()), weights_only=False)
    set_random_state(state["random"])
    time_steps.update(state["time_steps"])
    if averaged is None:
        return
    path = _path(folder, _writer(averaged))
    saved, own = torch.load(path, weights_only=False, map_location="cpu")["averaged"], _memory(averaged)
    if saved is None:
        say(f"{folder} holds no moving average (--train.enable_ema): it starts anew")
        return
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in saved]:
        raise ValueError(f"{path}: the moving average (--train.enable_ema) is that of another model")
    for tensor, value in zip(own, saved, strict=True):
        tensor.copy_(value)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"process_rank_{rank}.pt"


def _writer(averaged: nn.Module) -> int:
    """Return the rank that writes what this rank holds of the moving average: its own part under ZeRO-3."""
    is_partitioned = any(hasattr(parameter, "ds_tensor") for parameter in averaged.parameters())
    return dist.get_rank() if is_partitioned else 0


def _memory(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters' own memory: with ZeRO-3 this rank's part of each, else the whole."""
    return [getattr(parameter, "ds_tensor", parameter.data).detach() for parameter in model.parameters()]
