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

from arlopti_openrlhf.ops.lifecycle import progress
from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding
from arlopti_openrlhf.patching import replaced_attribute

_POLL = 2.0  # seconds


def of_run(run: Any, args: SimpleNamespace) -> AbstractContextManager[None]:
    """Watch a run (`driver.Driver`) in threads. In the context, `create_vllm_engines` starts one of them."""
    minutes = args.train.stall_minutes
    threading.Thread(target=_watch, args=(run.end, minutes), daemon=True).start()
    create = launcher.create_vllm_engines

    @functools.wraps(create)
    def created(*args, **kwargs):
        engines = create(*args, **kwargs)
        threading.Thread(target=_await, args=(engines, run.end), daemon=True).start()
        return engines

    return replaced_attribute(launcher, "create_vllm_engines", created)


def _await(engines: list[Any], end: Callable[[BaseException], Any]) -> None:
    """Call `end` with the cause if an engine cannot start. The actors would wait for it until PyTorch gives up."""
    try:
        ray.get([engine.__ray_ready__.remote() for engine in engines])
    except Exception as error:  # where the run ends already, `end` does nothing
        end(error)


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
