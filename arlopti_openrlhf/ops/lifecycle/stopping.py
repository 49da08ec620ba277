"""Ends a run early with its cause and an exit code of its own.

A stop travels as an exception: from an actor through `ray.get` to the driver, which hands it to its parent
(`ops.lifecycle.child`). A signal travels the other way: the driver leaves a request in Ray's key-value store, and the
controllers look there while they wait and between steps.
"""

import signal

import ray
from ray._private import worker
from ray.experimental import internal_kv


class RunStopped(Exception):
    """A reason to end a run before its last step. No final model is saved."""

    exit_code = 1


class Diverged(RunStopped):
    """The loss, a gradient, a weight or a log-prob is not finite, in too many steps in a row."""

    exit_code = 3


class NothingTrained(RunStopped):
    """All prompts have been drawn, and no step was trained."""

    exit_code = 6


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
    return int(get("stop") or 0) or None


def obey() -> None:
    """Raise `Interrupted` if a request to stop has come."""
    if signum := stop_requested():
        raise Interrupted(signum)


def set_training() -> None:
    """Report that a controller answers requests to stop. Before that a signal ends the run at once."""
    put("training", "1")


def is_training() -> bool:
    """Return whether a controller of this job answers requests to stop."""
    return bool(get("training"))


def put(name: str, value: str) -> None:
    """Leave a value for all processes of this job, in Ray's key-value store."""
    if ray.is_initialized():
        internal_kv._internal_kv_put(key(name), value, overwrite=True)


def get(name: str) -> bytes | None:
    """Return the value that a process of this job has left, or None."""
    return internal_kv._internal_kv_get(key(name)) if ray.is_initialized() else None


def key(name: str) -> str:
    """Return the name that a value of this job has in the store."""
    # Not by `ray.get_runtime_context()`, which would start a cluster where the run's has just been left.
    return f"arlopti_openrlhf/{worker.global_worker.current_job_id.hex()}/{name}"
