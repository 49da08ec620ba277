"""Gives each Ray actor of a run a sign of life, which the driver watches (`run.watch`).

A thread in each actor writes the sign to Ray's key-value store. It begins with the constructor, and goes on whatever
the actor, or whoever waits for it, is doing. So one limit holds for every wait of a run: initialisation, generation,
weight sync, update, evaluation and checkpoints. A part that works for long is not taken for one that is stuck.
"""

import asyncio
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine
from ray.experimental import internal_kv

from arlopti_openrlhf.run import stopping

_BEAT = 2.0  # seconds between two signs


def install() -> None:
    """Make OpenRLHF start its actors with a heart.

    Call it on the driver, after every other change to these classes, and before the CLI is imported, which binds them.
    Ray pickles the classes by value.
    """
    vllm_engine.RolloutRayActor = living_engine(vllm_engine.RolloutRayActor)
    ppo_actor.PolicyModelActor = living(ppo_actor.PolicyModelActor, "policy")
    ppo_critic.CriticModelActor = living(ppo_critic.CriticModelActor, "critic")
    launcher.ReferenceModelActor = living(launcher.ReferenceModelActor, "reference model")
    launcher.RewardModelActor = living(launcher.RewardModelActor, "reward model")
    ppo_trainer.PPOTrainer = living(ppo_trainer.PPOTrainer, "controller")
    ppo_trainer_async.PPOTrainerAsync = living(ppo_trainer_async.PPOTrainerAsync, "controller")
    ppo_trainer_async.GenerateSamplesActor = living(ppo_trainer_async.GenerateSamplesActor, "rollout controller")
    ppo_trainer_async.TrainingActor = living(ppo_trainer_async.TrainingActor, "training controller")


def prefix() -> str:
    """Return what the keys of this job's signs begin with. The rest of a key is the actor's id."""
    return stopping.key("life/")


class Heart:
    """Writes a sign of life to Ray's key-value store for as long as `sign` returns.

    The first one is there when this returns: without any, nobody would know that the actor is to be watched.

    Args:
        who: what the actor is, for messages.
        sign: returns a number. Only a change is a sign of life. What it raises says that the actor has failed.
    """

    def __init__(self, who: str, sign: Callable[[], float]) -> None:
        self.sign = sign
        self.name = f"{who} (process {os.getpid()} on {socket.gethostname()})"
        self.key = prefix() + ray.get_runtime_context().get_actor_id()
        if self._beat():
            threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        while True:
            time.sleep(_BEAT)
            if not self._beat():
                return

    def _beat(self) -> bool:
        """Write a sign, and say whether to go on."""
        try:
            sign, failure = self.sign(), None
        except Exception as error:
            sign, failure = 0.0, f"{type(error).__name__}: {error}"
        entry = {"name": self.name, "sign": sign, "failure": failure}
        internal_kv._internal_kv_put(self.key, json.dumps(entry), overwrite=True)
        return failure is None


def living(actor_class, who: str) -> Any:
    """Return a Ray actor class with a heart, which beats while the process runs at all."""

    base: Any = _plain(actor_class)

    class Living(base):
        def __init__(self, *args, **kwargs) -> None:
            Heart(who, itertools.count().__next__)
            super().__init__(*args, **kwargs)

    return _named_as(actor_class, Living)


def living_engine(actor_class) -> Any:
    """Return the Ray actor class of a vLLM engine with a heart that beats through the engine's own process.

    A request that waits does not stop it, nor does a long generation. A sync of weights does while it waits for the
    policy. The constructor blocks the actor, so until its end the sign is the CPU time of what it starts.
    """

    base: Any = _plain(actor_class)

    class Living(base):
        async def __init__(self, *args, **kwargs):
            self._loop = asyncio.get_running_loop()
            self._is_built = False
            self._signs = itertools.count(1)
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            Heart("vLLM engine", self._sign_of_life)
            await super().__init__(*args, **kwargs)
            self._is_built = True

        def _sign_of_life(self) -> float:
            if not self._is_built:
                return -cpu_seconds(self._clock)
            asyncio.run_coroutine_threadsafe(self.llm.is_sleeping(), self._loop).result()
            return next(self._signs)

    return _named_as(actor_class, Living)


def cpu_seconds(clock: int) -> float:
    """Return the CPU time of a thread of this process and of all processes below this one.

    Args:
        clock: the thread's CPU clock.
    """
    seconds = time.clock_gettime(clock)
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        seconds += times.user + times.system
    # In tenths, because a thread that waits looks up now and then, which is no work.
    return round(seconds, 1)


def _plain(actor_class) -> Any:
    """Return the class behind a Ray actor class."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def _named_as(actor_class, living_class: type) -> Any:
    """Return the Ray actor class of `living_class`, under the name that processes and Ray's messages show."""
    living_class.__name__ = living_class.__qualname__ = _plain(actor_class).__name__
    return ray.remote(living_class)
