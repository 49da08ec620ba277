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
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine
from ray.experimental import internal_kv
from torch.nn.modules.module import register_module_forward_hook

from arlopti_openrlhf.ops.lifecycle import stopping
from arlopti_openrlhf.ops.rollouts.reward_client import RewardExecutor
from arlopti_openrlhf.patching import plain_class

_BEAT = 2.0  # seconds between two beats
_BLOCK = 2**24  # bytes read or written that count as work. What an idle process writes comes to less in an hour
WORKS = 0.05  # CPU seconds per second that a start takes at least. An idle actor and its heartbeat take 0.01
_FRAMES = 5
# Where an actor waits for others: the files of the innermost call.
_WAITS = ("/ray/_private/", "/torch/distributed/", "/selectors.py")


def install() -> None:
    """Make OpenRLHF start its actors with a heartbeat.

    Call it on the driver, after every other change to these classes, and before the CLI is imported, which binds them.
    Ray pickles the classes by value.
    """
    vllm_engine.RolloutRayActor = engine(vllm_engine.RolloutRayActor)
    ppo_actor.PolicyModelActor = rank(ppo_actor.PolicyModelActor, "policy")
    ppo_critic.CriticModelActor = rank(ppo_critic.CriticModelActor, "critic")
    launcher.ReferenceModelActor = rank(launcher.ReferenceModelActor, "reference model")
    launcher.RewardModelActor = rank(launcher.RewardModelActor, "reward model")
    ppo_trainer.PPOTrainer = controller(ppo_trainer.PPOTrainer, "controller")
    ppo_trainer_async.PPOTrainerAsync = controller(ppo_trainer_async.PPOTrainerAsync, "controller")
    ppo_trainer_async.GenerateSamplesActor = controller(ppo_trainer_async.GenerateSamplesActor, "rollout controller")
    ppo_trainer_async.TrainingActor = controller(ppo_trainer_async.TrainingActor, "training controller")


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
        look: called before each beat. While it blocks there is none. What it raises says that the actor has failed.
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
        self._running: list[str] = []
        self._starting, self._thread = 0, threading.get_ident()
        if self._beat():
            threading.Thread(target=self._go_on, daemon=True).start()

    def count(self, *_: object) -> None:
        """Count a unit of work. It takes and changes nothing of what a hook gets."""
        self.done += 1

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Say that the actor is in a call of `method`, and count the call when it ends."""
        starts = method == "__init__" or (self.starts_by_calls and method not in self._known)
        self._known.add(method)
        self._running.append(method)
        self._starting, self._thread = self._starting + starts, threading.get_ident()
        try:
            yield
        finally:
            self._running.remove(method)
            self._starting -= starts
            self.count()

    def _go_on(self) -> None:
        while True:
            time.sleep(_BEAT)
            if not self._beat():
                return

    def _beat(self) -> bool:
        """Write an entry, and say whether to go on."""
        try:
            self.look()
            if self._starting:
                self._count_cpu()
            failure = None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        self._beats += 1
        calls = self._calls() if self._running else None
        entry = {
            "name": self.name,
            "beats": self._beats,
            "done": self.done + _bytes_moved() // _BLOCK,
            "calls": calls,
            "failure": failure,
        }
        internal_kv._internal_kv_put(self.key, json.dumps(entry), overwrite=True)
        return failure is None

    def _count_cpu(self) -> None:
        """Count it as work if this process and those that it has started have used the CPU since the last time."""
        before, cpu = self._cpu
        self._cpu = now, used = time.monotonic(), cpu_seconds(self.workers)
        self.done += used - cpu > WORKS * (now - before)

    def _calls(self) -> list[str]:
        """Return the innermost calls of the actor's thread, the innermost first, each with its file."""
        frame: FrameType | None = sys._current_frames().get(self._thread)
        calls: list[str] = []
        while frame and len(calls) < _FRAMES:
            path = frame.f_code.co_filename
            if path != __file__:
                calls.append(f"{frame.f_code.co_name} ({path}:{frame.f_lineno})")
            frame = frame.f_back
        return calls


def waits(calls: list[str]) -> bool:
    """Return whether an actor with these calls waits for others."""
    return any(place in calls[0] for place in _WAITS)


def shown(calls: list[str]) -> str:
    """Return calls as a message shows them: without the folders of their files."""
    return " < ".join(f"{name} ({Path(path).name}" for name, path in (call.split(" (", 1) for call in calls))


def controller(actor_class, who: str) -> Any:
    """Return a Ray actor class with a heartbeat."""
    base: Any = plain_class(actor_class)

    class WithHeartbeat(base):
        def __init__(self, *args, **kwargs) -> None:
            self._heartbeat = Heartbeat(who)
            with self._heartbeat.running("__init__"):
                super().__init__(*args, **kwargs)

    return _actor(actor_class, WithHeartbeat)


def rank(actor_class, who: str) -> Any:
    """Return the Ray actor class of a model's rank with a heartbeat, which counts modules and gradients as work.

    A micro-batch may take long where the machine is slow, and a module less so. The hooks only count.
    """
    base: Any = plain_class(actor_class)

    class WithHeartbeat(base):
        def __init__(self, *args, **kwargs) -> None:
            self._heartbeat = Heartbeat(who, starts_by_calls=True)
            register_module_forward_hook(self._heartbeat.count)
            with self._heartbeat.running("__init__"):
                super().__init__(*args, **kwargs)

        def init_model_from_pretrained(self, *args, **kwargs) -> None:
            super().init_model_from_pretrained(*args, **kwargs)
            for model in vars(self).values():
                for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(self._heartbeat.count)

    return _actor(actor_class, WithHeartbeat)


def engine(actor_class) -> Any:
    """Return the Ray actor class of a vLLM engine with a heartbeat that goes through the engine's own process.

    A request that waits does not stop it, nor does a long generation: its tokens are work. So is a call for a
    reward, which has a limit of its own. A sync of weights does stop it while it waits for the policy.
    """
    base: Any = plain_class(actor_class)

    class WithHeartbeat(base):
        async def __init__(self, *args, **kwargs):
            self._loop, self._is_built, self._tokens = asyncio.get_running_loop(), False, 0
            # With tensor parallelism the workers are actors of Ray, and the engine's process only waits for them.
            self._heartbeat = Heartbeat("vLLM engine", workers="ray::RayWorker", look=self._look)
            with self._heartbeat.running("__init__"):
                await super().__init__(*args, **kwargs)
            self._is_built = True

        def _look(self) -> None:
            if self._is_built:  # the constructor blocks the loop
                asyncio.run_coroutine_threadsafe(self._look_at_requests(), self._loop).result()

        async def _look_at_requests(self) -> None:
            await self.llm.is_sleeping()
            before, self._tokens = self._tokens, tokens_under_way(self.llm)
            is_rewarding = isinstance(self.executor, RewardExecutor) and self.executor.calls > 0
            self._heartbeat.done += self._tokens != before or is_rewarding

    return _actor(actor_class, WithHeartbeat)


def tokens_under_way(llm: Any) -> int:
    """Return how many tokens vLLM has generated of the requests that are not finished."""
    return sum(request.detokenizer.num_output_tokens() for request in llm.output_processor.request_states.values())


def cpu_seconds(workers: str | None = None) -> float:
    """Return the CPU time of this process, without this thread, and of all processes below it.

    Args:
        workers: how further processes on this machine are called, which count too.
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


def _bytes_moved() -> int:
    """Return how many bytes the other threads have read and written, with mapped files and without the network."""
    return _bytes_of("self") - _bytes_of("thread-self")


def _bytes_of(process: str) -> int:
    try:
        lines = Path("/proc", process, "io").read_text("utf-8").splitlines()
    except OSError:  # some containers do not let a process see it
        return 0
    count = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    return count["rchar"] + count["wchar"] + count["read_bytes"]


def _actor(actor_class, with_heartbeat: type) -> Any:
    """Return the Ray actor class of `with_heartbeat`, under the name that processes and Ray's messages show.

    Its heartbeat knows of the calls of all public methods.
    """
    for name, method in inspect.getmembers(with_heartbeat, inspect.isfunction):
        if not name.startswith("_"):
            setattr(with_heartbeat, name, _known_to_heartbeat(method))
    with_heartbeat.__name__ = with_heartbeat.__qualname__ = plain_class(actor_class).__name__
    return ray.remote(with_heartbeat)


def _known_to_heartbeat(method: Callable) -> Callable:
    @functools.wraps(method)
    async def awaited(self, *args, **kwargs):
        with self._heartbeat.running(method.__name__):
            return await method(self, *args, **kwargs)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._heartbeat.running(method.__name__):
            return method(self, *args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else call
