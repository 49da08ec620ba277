"""Gives each Ray actor of a run a heartbeat, which the driver watches (`ops.lifecycle.watch`).

A thread in each actor writes two numbers to Ray's key-value store. One says that the process runs: it starts in the
constructor and continues while the actor works or waits. The other counts what the actor has done. A call that hangs
does not move it, and neither does an endless loop.
"""

import asyncio
import functools
import inspect
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
import torch
from ray.experimental import internal_kv
from torch.nn.modules.module import register_module_forward_hook

from arlopti_openrlhf import loopback
from arlopti_openrlhf.ops.lifecycle import stopping
from arlopti_openrlhf.patching import Upstream, plain_class

_BEAT = 2.0  # seconds between two beats
_BLOCK = 2**24  # bytes read or written that count as work. What an idle process writes comes to less in an hour
WORKS = 0.05  # CPU seconds per second that a start takes at least. An idle actor and its heartbeat take 0.01
_FRAMES = 5  # of a call that hangs, in the message


def with_heartbeat(actor_class: Any, kind: type, who: str) -> Any:
    """Return the Ray actor class with a heartbeat, which counts the calls of all public methods.

    Args:
        actor_class: OpenRLHF's. Processes and Ray's messages show its name.
        kind: `Controller`, `Rank` or `Engine`.
        who: what the actor is, for messages.
    """
    base = plain_class(actor_class)
    derived = type(base.__name__, (kind, base), {"who": who})
    for name, method in inspect.getmembers(derived, inspect.isfunction):
        if not name.startswith("_"):
            setattr(derived, name, _counted(method))
    return ray.remote(derived)


def give(actor_class: Any) -> Any:
    """Return a Ray actor class of OpenRLHF's with the heartbeat of its kind."""
    return with_heartbeat(actor_class, *_KINDS[plain_class(actor_class).__name__])


def _counted(method: Callable) -> Callable:
    @functools.wraps(method)
    async def awaited(self, *args, **kwargs):
        with self._heartbeat.running(method.__name__):
            return await method(self, *args, **kwargs)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._heartbeat.running(method.__name__):
            return method(self, *args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else call


class Controller(Upstream):
    """An actor that calls the others."""

    who: str
    starts_by_calls = False

    def __init__(self, *args, **kwargs) -> None:
        loopback.keep()
        self._heartbeat = Heartbeat(self.who, self.starts_by_calls)
        with self._heartbeat.running("__init__"):
            super().__init__(*args, **kwargs)


class Rank(Controller):
    """A model's rank, whose modules and gradients count as work.

    A micro-batch may take long where the machine is slow, and a module less so. The hooks only count.
    """

    starts_by_calls = True

    def init_model_from_pretrained(self, *args, **kwargs) -> None:
        super().init_model_from_pretrained(*args, **kwargs)
        register_module_forward_hook(self._heartbeat.count)
        for model in vars(self).values():
            for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._heartbeat.count)


class Rewards:
    """What an engine asks for rewards. Each of its calls has a limit of its own, so a call under way is work."""

    calls = 0  # under way


class Engine(Upstream):
    """A vLLM engine with a heartbeat that goes through the engine's own process.

    A request that waits does not stop it, nor does a long generation: its tokens are work. So is a call for a
    reward, which has a limit of its own. A sync of weights does stop it while it waits for the policy.
    """

    who: str

    async def __init__(self, *args, **kwargs):
        self._loop, self._is_built, self._tokens = asyncio.get_running_loop(), False, 0
        # With tensor parallelism the workers are actors of Ray, and the engine's process only waits for them.
        self._heartbeat = Heartbeat(self.who, workers="ray::RayWorker", look=self._look)
        with self._heartbeat.running("__init__"):
            await super().__init__(*args, **kwargs)
        self._is_built = True

    def _look(self) -> None:
        if self._is_built:  # the constructor blocks the loop
            asyncio.run_coroutine_threadsafe(self._look_at_requests(), self._loop).result()

    async def _look_at_requests(self) -> None:
        await self.llm.is_sleeping()
        # The tokens of the requests that are not finished.
        requests = self.llm.output_processor.request_states.values()
        before, self._tokens = self._tokens, sum(r.detokenizer.num_output_tokens() for r in requests)
        is_rewarding = isinstance(self.executor, Rewards) and self.executor.calls > 0
        self._heartbeat.done += self._tokens != before or is_rewarding


# By OpenRLHF's name for an actor's class, its kind and what messages call it.
_KINDS: dict[str, tuple[type, str]] = {
    "RolloutRayActor": (Engine, "vLLM engine"),
    "PolicyModelActor": (Rank, "policy"),
    "CriticModelActor": (Rank, "critic"),
    "ReferenceModelActor": (Rank, "reference model"),
    "RewardModelActor": (Rank, "reward model"),
    "PPOTrainer": (Controller, "controller"),
    "PPOTrainerAsync": (Controller, "controller"),
    "GenerateSamplesActor": (Controller, "rollout controller"),
    "TrainingActor": (Controller, "training controller"),
}


def prefix() -> str:
    """Return what the keys of this job's heartbeats begin with. The rest of a key is the actor's id."""
    return stopping.key("heartbeat/")


class Heartbeat:
    """Writes an actor's state to Ray's key-value store every few seconds.

    The first entry is there when this returns: without one, the watch would not know of the actor.

    Args:
        who: what the actor is, for messages.
        starts_by_calls: whether the first call of each method may load, build or compile something, as the
            constructor does. CPU time counts as work there, and nowhere else: a loop without end has it too.
        workers: the name of further processes that do the work of a start, besides the children of this one.
        look: called before each beat. While it blocks there is none. If it raises, the actor has failed.
    """

    def __init__(
        self,
        who: str,
        starts_by_calls: bool = False,
        workers: str | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = f"{who} (process {os.getpid()} on {socket.gethostname()})"
        self.key = prefix() + ray.get_runtime_context().get_actor_id()
        self.starts_by_calls, self.workers, self.look = starts_by_calls, workers, look
        self.done = 0  # modules, gradients, requests, calls: any of them is progress
        self._beats, self._cpu = 0, (time.monotonic(), 0.0)
        self._known: set[str] = set()  # methods that have been called
        self._running: list[tuple[str, bool]] = []  # a method, and whether its call is a start
        self._thread = threading.get_ident()
        if self._beat():
            threading.Thread(target=self._go_on, daemon=True).start()

    def count(self, *_: object) -> None:
        """Count a unit of work. It takes and changes nothing of what a hook gets."""
        self.done += 1

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Note that the actor is in a call of `method`, and count the call when it ends."""
        call = (method, method == "__init__" or (self.starts_by_calls and method not in self._known))
        self._known.add(method)
        self._running.append(call)
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._running.remove(call)
            self.count()

    def _go_on(self) -> None:
        while True:
            time.sleep(_BEAT)
            if not self._beat():
                return

    def _beat(self) -> bool:
        """Write an entry. Return whether the actor has not failed."""
        failure = None
        try:
            self.look()
            if any(is_start for _, is_start in self._running):
                before, cpu = self._cpu
                self._cpu = now, used = time.monotonic(), _cpu_seconds(self.workers)
                self.done += used - cpu > WORKS * (now - before)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        self._beats += 1
        entry = {
            "name": self.name,
            "beats": self._beats,
            "done": self.done + (_bytes_moved("self") - _bytes_moved("thread-self")) // _BLOCK,
            "calls": self._calls() if self._running else None,
            "failure": failure,
        }
        internal_kv._internal_kv_put(self.key, json.dumps(entry), overwrite=True)
        return failure is None

    def _calls(self) -> list[tuple[str, str, int]]:
        """Return the innermost calls of the actor's thread, the innermost first: function, file and line."""
        frame: FrameType | None = sys._current_frames().get(self._thread)
        calls: list[tuple[str, str, int]] = []
        while frame and len(calls) < _FRAMES:
            if frame.f_code.co_filename != __file__:
                calls.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return calls


def _cpu_seconds(workers: str | None) -> float:
    """Return the CPU time of this process, without this thread, and of all processes below it.

    Args:
        workers: how the names of further processes on this machine begin, which count too.
    """
    seconds = time.process_time() - time.thread_time()
    processes = psutil.Process().children(recursive=True)
    if workers:
        # A process that may not be looked at has no name.
        processes += [p for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith(workers)]
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        seconds += times.user + times.system
    return seconds


def _bytes_moved(task: str) -> int:
    """Return how many bytes a folder of /proc has read and written, with mapped files and without the network."""
    try:
        lines = Path("/proc", task, "io").read_text("utf-8").splitlines()
    except OSError:  # some containers do not let a process see it
        return 0
    count = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    return count["rchar"] + count["wchar"] + count["read_bytes"]
