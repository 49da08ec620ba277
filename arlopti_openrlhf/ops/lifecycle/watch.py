"""Watches a run's actors by their heartbeats (`ops.lifecycle.heartbeat`), and ends a run that cannot go on.

A run is ended when an actor has died, has failed or has no heartbeat, or when no actor makes progress. An actor
that waits for another is no cause: the run is alive as long as one of them makes progress. If no actor is in a call,
there is nothing to be done.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
from ray._private import state, worker
from ray.experimental import internal_kv

from arlopti_openrlhf.ops.lifecycle import awake, heartbeat
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding, RunStopped

_POLL = 1.0  # seconds
# Where an actor waits for others: the files of the innermost call.
_WAITS = ("/ray/_private/", "/torch/distributed/", "/selectors.py")
# How an actor ends that is no longer needed.
_INTENDED = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED")
_COLOURS = re.compile(r"\x1b\[\d*m")


def of_run(run: Any, args: SimpleNamespace) -> None:
    """Watch a run (`driver.Driver`)."""
    start(run.end, 60 * args.train.stall_minutes)


def start(end: Callable[[BaseException], Any], seconds: float) -> None:
    """Watch the job of this process in a thread. It calls `end` with the cause once the run cannot continue."""
    threading.Thread(target=_watch, args=(end, seconds), daemon=True).start()


def _watch(end: Callable[[BaseException], Any], seconds: float) -> None:
    watch, clock = Watch(seconds), awake.Clock()
    answered = clock()
    while True:
        time.sleep(_POLL)
        try:
            cause = watch.look() if ray.is_initialized() else None
            answered = clock()
        except Exception as error:  # Ray starts or ends, or its control store is away
            is_late = clock() - answered > seconds
            cause = NotResponding(f"Ray's control store: {type(error).__name__}: {error}") if is_late else None
        if cause:
            end(cause)
            return


class Watch:
    """Finds what is wrong with a job's actors.

    Args:
        seconds: how long an actor may have no heartbeat, and the run may make no progress.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._clock = awake.Clock()  # a watch that was asleep cannot tell what the actors did meanwhile
        self._seen: dict[str, tuple[Any, float]] = {}  # actor -> its last beat, and since when
        self._cpu: dict[str, tuple[float, float]] = {}  # actor that is imported -> when, and its CPU seconds then
        self._done: dict[str, int] = {}  # actor -> what it has got done
        self._moved = 0.0  # when an actor got something done, or none was called

    def look(self) -> RunStopped | None:
        """Return why the run cannot go on, or None. Call it every second or so."""
        now, prefix = self._clock(), heartbeat.prefix()
        keys = [key.decode() for key in internal_kv._internal_kv_list(prefix) or []]
        entries = {key.removeprefix(prefix): json.loads(internal_kv._internal_kv_get(key) or b"{}") for key in keys}
        for actor, found in _actors("PENDING_CREATION").items():
            if found["Pid"] and actor not in entries:  # it imports the class: its constructor has not begun
                pid, address = found["Pid"], found["Address"]["IPAddress"]
                name = f"{found['ActorClassName']} (process {pid} on {address})"
                is_alive = self._has_worked(actor, pid, address, now)
                beats = now if is_alive else self._seen.get(actor, (0.0, 0.0))[0]
                entries[actor] = {"name": name, "beats": beats, "done": 0, "calls": None, "failure": None}
        for actor, found in _actors("DEAD").items():
            entry = entries.pop(actor, {"name": found["ActorClassName"]})
            if cause := death(entry["name"], found["DeathCause"]):
                return cause
        for actor, entry in entries.items():
            if entry["failure"]:
                return NotResponding(f"{entry['name']}: {entry['failure']}")
            if self._seen.get(actor, (None, 0))[0] != entry["beats"]:
                self._seen[actor] = (entry["beats"], now)
        done = {actor: entry["done"] for actor, entry in entries.items()}
        if done != self._done or not any(entry["calls"] for entry in entries.values()):
            self._done, self._moved = done, now
        return self._silence(entries, now) or self._standstill(entries, now)

    def _has_worked(self, actor: str, pid: int, address: str, now: float) -> bool:
        """Return whether the process that imports an actor's class has used the CPU since the last look.

        Imports take seconds, and a multiple of them where other processes have the cores. Of a process on another
        node nothing is known.
        """
        cpu = 0.0
        with suppress(psutil.Error):
            if address == ray.util.get_node_ip_address():
                times = psutil.Process(pid).cpu_times()
                cpu = times.user + times.system
        before, self._cpu[actor] = self._cpu.get(actor, (0.0, 0.0)), (now, cpu)
        return cpu - before[1] > heartbeat.WORKS * (now - before[0])

    def _silence(self, entries: dict[str, dict], now: float) -> NotResponding | None:
        """Name the actor without a heartbeat for too long, and those for half as long: one may wait for the other.

        Where the run stands still because of the first, half as long is enough for all of them.
        """
        silent = sorted((now - self._seen[actor][1], entry["name"]) for actor, entry in entries.items())[::-1]
        stands_still = now - self._moved > self.seconds
        if not silent or silent[0][0] <= self.seconds / (2 if stands_still else 1):
            return None
        names = ", ".join(name for seconds, name in silent if seconds > self.seconds / 2)
        return NotResponding(f"{names}: no sign of life for {silent[0][0]:.0f} s (--train.stall_minutes)")

    def _standstill(self, entries: dict[str, dict], now: float) -> NotResponding | None:
        """Name the actors whose calls do not progress, and their place. Those that wait are named only if all do."""
        if now - self._moved <= self.seconds:
            return None
        called = [entry for entry in entries.values() if entry["calls"]]
        stuck = [entry for entry in called if not any(place in entry["calls"][0][1] for place in _WAITS)] or called
        where = "; ".join(f"{entry['name']}, in {_shown(entry['calls'])}" for entry in stuck)
        return NotResponding(f"{where}: no progress for {now - self._moved:.0f} s (--train.stall_minutes)")


def _shown(calls: list[tuple[str, str, int]]) -> str:
    return " < ".join(f"{name} ({Path(path).name}:{line})" for name, path, line in calls)


def _actors(in_state: str) -> dict[str, dict[str, Any]]:
    """Return this job's actors in a state of Ray's: id → entry of Ray's table."""
    return state.state.actor_table(None, job_id=worker.global_worker.current_job_id, actor_state_name=in_state)


def death(name: str, cause: Any) -> RunStopped | None:
    """Return why an actor is dead, by its `ActorDeathCause` in Ray's table, or None if it was no longer needed."""
    kind = cause.WhichOneof("context")
    if kind == "creation_task_failure_context":
        return RunStopped(f"{name}: {_last_error(cause.creation_task_failure_context.formatted_exception_string)}")
    died = cause.actor_died_error_context
    if kind == "actor_died_error_context" and died.Reason.Name(died.reason) in _INTENDED:
        return None
    message = " ".join(getattr(cause, kind).error_message.split()) if kind else "Ray does not say why"
    return NotResponding(f"{name} has died: {message[:300]}")


def _last_error(text: str) -> str:
    """Return the error at the end of a traceback, on one line."""
    lines = _COLOURS.sub("", text).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    rest = lines[frames[-1] + 1 :] if frames else lines
    return " ".join(line.strip() for line in rest if not line.startswith("    "))[:1000]
