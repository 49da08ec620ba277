"""Ends a run early with its cause and an exit code of its own, and lets no wait last for ever.

A stop travels as an exception: from an actor through `ray.get` to the driver, which prints one line and exits
(`run.driver`). A signal travels the other way: the driver leaves a request in Ray's key-value store, and the
controllers look there while they wait and between steps.
"""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

_POLL = 1.0  # seconds between two looks at what is waited for


class RunStopped(Exception):
    """Says why a run ends before its last step. No final model is saved."""

    exit_code = 1


class Diverged(RunStopped):
    """The loss, a gradient, a weight or a log-prob is not finite, too often in a row to go on."""

    exit_code = 3


class NotResponding(RunStopped):
    """A part of the run gives no sign of life any more."""

    exit_code = 4


class Interrupted(RunStopped):
    """A signal asks the run to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)  # pickled with the exception
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"{signal.Signals(self.args[0]).name} received"


def request_stop(signum: int) -> None:
    """Ask the run's controllers to save a checkpoint and end, because of a signal."""
    put("stop", str(signum))


def stop_requested() -> int | None:
    """Return the signal that asks this job to end, or None."""
    value = get("stop")
    return int(value) if value else None


def set_training() -> None:
    """Say that a controller is ready to answer a request to stop. Before that a signal ends the driver at once."""
    put("training", "1")


def is_training() -> bool:
    """Return whether a controller of this job answers requests to stop."""
    return bool(get("training"))


def put(name: str, value: str) -> None:
    """Leave a value for all processes of this job, in Ray's key-value store."""
    internal_kv._internal_kv_put(_key(name), value, overwrite=True)


def get(name: str) -> bytes | None:
    """Return the value that a process of this job has left, or None."""
    return internal_kv._internal_kv_get(_key(name))


def _key(name: str) -> str:
    return f"arlopti_openrlhf/{ray.get_runtime_context().get_job_id()}/{name}"


def wait(
    refs: Sequence[ray.ObjectRef],
    what: str,
    seconds: float,
    progress: Callable[[], Any] | None = None,
    interruptible: bool = False,
) -> list[Any]:
    """Return the results of `refs`, in their order, as `ray.get` does, but not after any time.

    The first error is raised at once, while others still wait, so that a rank which waits in a collective call for one
    that has died holds nobody up.

    Args:
        refs: what to wait for.
        what: what that is, for the message, such as "the weight sync".
        seconds: how long without progress.
        progress: returns anything; a change is progress. It may raise `NotResponding` itself. None: the end of one of
            `refs` is the only progress.
        interruptible: a request to stop ends the wait.

    Raises:
        NotResponding: there was no progress for `seconds`.
        Interrupted: a request to stop, where `interruptible`.
        Exception: what one of `refs` raised.
    """
    pending, results = list(refs), dict[ray.ObjectRef, Any]()
    last: Any = None
    since = time.monotonic()
    while pending:
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL)
        results.update(zip(ready, ray.get(ready), strict=True))
        if interruptible and (signum := stop_requested()):
            raise Interrupted(signum)
        sign = (len(pending), progress() if progress else None)
        if sign != last:
            last, since = sign, time.monotonic()
        elif time.monotonic() - since > seconds:
            raise NotResponding(f"{what}: no sign of life for {seconds:.0f} s (--train.stall_minutes)")
    return [results[ref] for ref in refs]
