"""What each process adds to a checkpoint, and how the ranks of a model stay together where one of them may fail."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.lifecycle.stopping import RunStopped

T = TypeVar("T")


def everywhere(do: Callable[[], T]) -> list[T]:
    """Return what `do` returns on each rank, on every rank. All ranks have to call it.

    An error on one rank is raised on all, so no rank enters a collective call in which the others are missing.

    Raises:
        RunStopped, OSError: `do` raised it on some rank.
        RuntimeError: `do` raised anything else.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        value = do()
    except RunStopped as error:
        failure = error
    except OSError as error:
        failure = OSError(str(error))  # some subclasses cannot be pickled
    except Exception as error:
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, failure))
    for _, raised in answers:
        if raised:
            raise raised
    return [answer for answer, _ in answers]


def on_rank_0(do: Callable[[], T]) -> T:
    """Return what `do` returns on rank 0, on every rank. An error is raised on all."""
    answers: list[Any] = everywhere(lambda: do() if dist.get_rank() == 0 else None)
    return answers[0]


def share() -> slice:
    """Return which items of a sequence this rank works on, where all ranks share the work."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        terminal.say(line)


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
    state = torch.load(_path(folder, dist.get_rank()), weights_only=True)
    set_random_state(state["random"])
    time_steps.update(state["time_steps"])
    if averaged is None:
        return
    path, early = _path(folder, _writer(averaged)), folder / f"averaged_rank_{_writer(averaged)}.pt"
    if early.exists():  # where 0.1.0 kept the average at first
        saved = torch.load(early, weights_only=True, map_location="cpu")
    else:
        saved = torch.load(path, weights_only=True, map_location="cpu")["averaged"]
    own = _memory(averaged)
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
