"""Copies a micro-batch to the device in one piece, for which the host does not wait."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, which suits every type


def on_device(parts: Sequence[Any], device: torch.device | int | str) -> list[Any]:
    """Return dataclass instances with their tensors on the device. Tensors inside of other fields stay where they are.

    Copied one by one from pageable memory, the host would wait for each of them.

    Args:
        parts: on the CPU.
        device: on a GPU the tensors share one piece of memory, in which they do not overlap.
    """
    named = [{name: value for name, value in vars(part).items() if isinstance(value, Tensor)} for part in parts]
    moved = iter(_copied([tensor for of_part in named for tensor in of_part.values()], torch.device(device)))
    return [replace(part, **{name: next(moved) for name in names}) for part, names in zip(parts, named, strict=True)]


def _copied(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return tensors
    sizes = [tensor.nbytes for tensor in tensors]
    starts = list(accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0))

    def places(memory: Tensor) -> list[Tensor]:
        cut = (memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(cut, tensors, strict=True)]

    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(places(pinned), tensors, strict=True):
        place.copy_(tensor)
    return places(pinned.to(device, non_blocking=True))
