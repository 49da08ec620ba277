"""Looks for weights that are not finite in safetensors files, for a bounded time, without PyTorch."""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# The bits of an exponent, all of which are set in an infinity and in a NaN, by the file's name of the type.
_EXPONENTS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
_SECONDS = 3.0
_BYTES = 16 << 20  # that are read of a tensor at a time


def not_finite(folder: Path, files: Sequence[str]) -> str | None:
    """Return the first tensor found with a weight that is not finite, or None.

    Each tensor's first 16 MiB are looked at, in the order of a draw that is the same each time, and then the rest, as
    far as 3 s allow. The files have to be whole.
    """
    parts = [part for file in files if file.endswith(".safetensors") for part in _parts(folder / file)]
    random.Random(0).shuffle(parts)
    until = time.monotonic() + _SECONDS
    for _, file, name, kind, begin, end in sorted(parts, key=lambda part: part[0]):
        if time.monotonic() > until:
            return None
        unsigned, exponent = _EXPONENTS[kind]
        size = np.dtype(unsigned).itemsize
        values = np.fromfile(file, unsigned, (end - begin) // size, offset=begin)
        if bad := int(np.count_nonzero((values & unsigned(exponent)) == exponent)):
            return f"{file.name}: {bad} of {values.size} values of {name} are not finite"
    return None


def _parts(file: Path) -> list[tuple[int, Path, str, str, int, int]]:
    """Return the parts of each tensor: number, file, name, type, and where the part begins and ends in the file."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    parts = []
    for name, tensor in header.items():
        # A single number may be a bound that is infinite, such as those of a layer that clips.
        if name == "__metadata__" or tensor["dtype"] not in _EXPONENTS or not tensor["shape"]:
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        for number in range(math.ceil((end - begin) / _BYTES)):
            start = begin + number * _BYTES
            parts.append((number, file, name, tensor["dtype"], start, min(start + _BYTES, end)))
    return parts
