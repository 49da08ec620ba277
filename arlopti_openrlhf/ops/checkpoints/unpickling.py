"""Loads a checkpoint's files without running what they name.

A pickle may name any function and call it. So a checkpoint is loaded by PyTorch's unpickler for weights, which knows
tensors, numbers and text in lists and dictionaries, and calls nothing else but what is allowed here. What this package
writes itself needs none of that.
"""

import importlib
import operator
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

# PyTorch's own switches. A user who trusts a checkpoint loads with the first what is not allowed here.
OFF, _ON = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# What DeepSpeed leaves in a checkpoint.
_ALLOWED = (
    "builtins.getattr",  # see `_find`
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@contextmanager
def restricted() -> Iterator[None]:
    """Let every `torch.load` of this process call only what is allowed. DeepSpeed's asks to call anything."""
    if os.environ.get(OFF) or os.environ.get(_ON):
        yield
        return
    os.environ[_ON] = "1"
    try:
        with safe_globals([(_find(name), name) for name in _ALLOWED]):
            yield
    finally:
        del os.environ[_ON]


def not_allowed(path: Path) -> list[str]:
    """Return what a file would call that is not allowed. Nothing is called, and nothing is said of a broken file."""
    if os.environ.get(OFF):
        return []
    try:
        return sorted(set(get_unsafe_globals_in_checkpoint(path)) - set(_ALLOWED))
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return []


def damages(checkpoint: Path, rank: int, ranks: int) -> list[str]:
    """Return which files do not hold what was written, of those that a rank of so many reads: every byte of them.

    `torch.save` writes a zip, with a checksum of each record. Files that belong to no rank are rank 0's.
    """
    reasons = []
    for path in sorted(checkpoint.glob("*.pt")):
        numbered = re.search(r"(?:zero_pp|process)_rank_(\d+)", path.name)
        if int(numbered[1] if numbered else 0) % ranks != rank:  # the critic may have fewer ranks than the actor
            continue
        try:
            with zipfile.ZipFile(path) as file:
                if record := file.testzip():
                    reasons.append(f"{path.name} is damaged in {record}")
            get_unsafe_globals_in_checkpoint(path)  # PyTorch's own reader, which looks at more of the zip's end
        except Exception as error:  # zipfile raises errors of many kinds for what is no zip
            reasons.append(f"{path.name} is damaged ({type(error).__name__}: {error})")
    return reasons


def refusal(names: Sequence[str]) -> tuple[str, str]:
    """Return the problem with what would call `names`, and the remedy."""
    return f"on loading it would call {', '.join(names)}, which no run's checkpoint does", (
        f"give another path, or set {OFF}=1 if you trust where it comes from"
    )


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if name == "builtins.getattr":  # so Python 3.11.0 to 3.11.3 pickles an enumeration's member
        return operator.getitem  # gives members, too, and no attributes
    return getattr(importlib.import_module(module), attribute)
