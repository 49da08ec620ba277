"""Ends a run that stands still: by what its controllers report (`ops.lifecycle.progress`), or without an engine."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer import ray as launcher

from arlopti_openrlhf.ops.lifecycle import progress, stopping
from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding
from arlopti_openrlhf.patching import replaced_attribute

_POLL = 2.0  # seconds


def of_run(run: Any, args: SimpleNamespace) -> AbstractContextManager[None]:
    """Watch a run (`driver.Driver`) in a thread. In the context, it learns of the engines that start."""
    starts: list[ray.ObjectRef] = []
    threading.Thread(target=_watch, args=(run.end, args.train.stall_minutes, starts), daemon=True).start()
    create = launcher.create_vllm_engines

    @functools.wraps(create)
    def created(*args, **kwargs):
        engines = create(*args, **kwargs)
        starts.extend([engine.__ray_ready__.remote() for engine in engines])
        return engines

    return replaced_attribute(launcher, "create_vllm_engines", created)


def _watch(end: Callable[[BaseException], Any], minutes: float, starts: list[ray.ObjectRef]) -> None:
    """Call `end` with the cause once an engine cannot start, or nothing new was reported for so many minutes."""
    found, since = Progress(), time.monotonic()
    while time.monotonic() - since <= 60 * minutes:
        time.sleep(_POLL)
        try:
            stopping.ask(lambda: _look_at(starts))
        except Exception as error:  # else the actors would wait for the engine until PyTorch gives up
            return end(error)
        with suppress(Exception):  # Ray starts or ends
            before, found = found, progress.read()
            if found != before:
                since = time.monotonic()
    end(NotResponding(f"{_place(found)}: no progress for {minutes:g} minutes (--train.stall_minutes)"))


def _look_at(starts: list[ray.ObjectRef]) -> None:
    """Forget the engines that have started, and raise why one has not."""
    if starts:
        ended, starts[:] = ray.wait(starts, num_returns=len(starts), timeout=0)
        ray.get(ended)


def _place(found: Progress) -> str:
    step = f"after step {found.step.number}" if found.step else "before the first step's end"
    if found.phase is None:
        return "the start"
    samples = f", {found.phase.samples} samples finished" if found.phase.samples else ""
    return f"{found.phase.name} {step}{samples}"
