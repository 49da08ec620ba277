"""Ends a run that stands still, by what its controllers report (`ops.lifecycle.progress`)."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import ray

from arlopti_openrlhf.ops.lifecycle import progress
from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding

_POLL = 2.0  # seconds


def of_run(run: Any, args: SimpleNamespace) -> None:
    """Watch a run (`driver.Driver`) in a thread."""
    minutes = args.train.stall_minutes
    threading.Thread(target=_watch, args=(run.end, minutes), daemon=True).start()


def _watch(end: Callable[[BaseException], Any], minutes: float) -> None:
    """Call `end` with the cause once the run has reported nothing new for so many minutes."""
    found, since = Progress(), time.monotonic()
    while time.monotonic() - since <= 60 * minutes:
        time.sleep(_POLL)
        with suppress(Exception):  # Ray starts or ends
            before, found = found, progress.read() if ray.is_initialized() else Progress()
            if found != before:
                since = time.monotonic()
    end(NotResponding(f"{_place(found)}: no progress for {minutes:g} minutes (--train.stall_minutes)"))


def _place(found: Progress) -> str:
    step = f"after step {found.step.number}" if found.step else "before the first step's end"
    if found.phase is None:
        return "the start"
    samples = f", {found.phase.samples} samples finished" if found.phase.samples else ""
    return f"{found.phase.name} {step}{samples}"
