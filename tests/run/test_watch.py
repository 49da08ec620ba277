"""A dead, failed or stopped actor ends the run with its cause; one that works for long does not."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray.experimental import internal_kv
from waiting import wait_until

from arlopti_openrlhf.run import life, watch
from arlopti_openrlhf.run.stopping import NotResponding, RunStopped
from arlopti_openrlhf.run.watch import Watch

pytestmark = pytest.mark.whole_stack  # for their time

LIMIT = 6  # seconds without a sign of life


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Core:
    """Asks a process of its own, as vLLM asks its EngineCore."""

    def __init__(self):
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    async def is_sleeping(self):
        self.process.stdin.write(b"?\n")
        if not await asyncio.to_thread(self.process.stdout.readline):
            raise ConnectionError("the engine's process has ended")


@ray.remote
class Engine:
    async def __init__(self, seconds=0.0, error=None):
        self.llm = Core()
        if error:
            raise error
        time.sleep(seconds)  # blocks the actor, as vLLM's start does
        await self.llm.is_sleeping()

    async def pids(self):
        return os.getpid(), self.llm.process.pid


@ray.remote
class Rank:
    def pid(self):
        return os.getpid()

    def work(self, seconds):
        time.sleep(seconds)


class Slow:
    def __reduce__(self):
        return time.sleep, (60,)


@ray.remote
class RankThatImportsForLong:
    imported = Slow()


@ray.remote
class EngineThatStops:
    async def __init__(self, path):
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_cause(seconds=60.0, limit=LIMIT):
    """What a new watch finds within `seconds`, and after how many."""
    looks, start = Watch(limit), time.monotonic()
    while time.monotonic() - start < seconds:
        if cause := looks.look():
            return cause, time.monotonic() - start
        time.sleep(0.2)
    return None, seconds


def wait_for_constructor(handle):
    """The actor's process imports for 7 s on an idle core. Whoever is in the constructor has an entry."""
    key = life.prefix() + handle._actor_id.hex()
    assert wait_until(lambda: internal_kv._internal_kv_exists(key), seconds=300)


@pytest.fixture
def start():
    """start(Ray actor class, arguments) → handle; all end with the test, as actors that nobody needs."""
    handles = []

    def new(actor_class, *args):
        handles.append(actor_class.remote(*args))
        return handles[-1]

    yield new
    for handle in handles:
        ray.kill(handle)


def test_actors_that_wait_for_their_place_work_for_long_and_end_are_no_cause(start):
    start(life.living(Rank, "policy").options(num_cpus=99))
    engine, rank = start(life.living_engine(Engine)), start(life.living(Rank, "policy"))
    ray.get([engine.pids.remote(), rank.pid.remote()])
    rank.work.remote(60)
    assert wait_for_cause(3 * LIMIT)[0] is None
    ray.kill(engine)
    assert wait_for_cause(2)[0] is None


@pytest.mark.parametrize("which", [0, 1], ids=["the actor", "its engine's process"])
def test_a_stopped_engine(start, which):
    pid = ray.get(start(life.living_engine(Engine)).pids.remote())[which]
    os.kill(pid, signal.SIGSTOP)
    try:
        cause, seconds = wait_for_cause()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(cause, NotResponding) and seconds < 3 * LIMIT
    assert "vLLM engine (process" in str(cause) and "no sign of life for" in str(cause)


def test_an_actor_that_stops_at_once(start, tmp_path):
    path = tmp_path / "pid"
    wait_for_constructor(start(life.living_engine(EngineThatStops), path))
    try:
        cause, seconds = wait_for_cause()
    finally:
        os.kill(pid := int(path.read_text()), signal.SIGCONT)
    assert f"vLLM engine (process {pid} on" in str(cause) and "no sign of life for" in str(cause)


def test_an_actor_that_never_gets_to_its_constructor(start):
    start(life.living(RankThatImportsForLong, "policy"))
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and "RankThatImportsForLong (process" in str(cause)


def test_an_engine_that_is_stuck_in_its_start(start):
    wait_for_constructor(start(life.living_engine(Engine), 60.0))
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and "vLLM engine (process" in str(cause)


def test_a_stopped_rank_is_named(start):
    ranks = [start(life.living(Rank, "policy")) for _ in range(2)]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    os.kill(pids[1], signal.SIGSTOP)
    try:
        cause, seconds = wait_for_cause(limit=2 * LIMIT)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert f"policy (process {pids[1]} on" in str(cause) and str(pids[0]) not in str(cause)


def test_an_engine_whose_process_was_killed(start):
    pid, core = ray.get(start(life.living_engine(Engine)).pids.remote())
    os.kill(core, signal.SIGKILL)
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and f"vLLM engine (process {pid} on" in str(cause)
    assert "Error: " in str(cause)


# From here on Ray remembers dead actors.


def test_a_rank_that_was_killed_ends_the_run_once(start):
    causes = []
    pid = ray.get(start(life.living(Rank, "policy")).pid.remote())
    watch.start(causes.append, LIMIT)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: causes, seconds=20)
    time.sleep(3)
    assert len(causes) == 1 and isinstance(causes[0], NotResponding)
    assert f"policy (process {pid}" in str(causes[0]) and "has died" in str(causes[0])


def test_an_engine_that_fails_in_its_constructor(start):
    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    start(life.living_engine(Engine), 0.0, ValueError("utilization 1.5:\n  must be below 1"))
    cause, seconds = wait_for_cause(300, limit=300)  # a new cluster starts its first worker, and the worker imports
    assert type(cause) is RunStopped and cause.exit_code == 1
    assert str(cause).endswith("ValueError: utilization 1.5: must be below 1") and "vLLM engine" in str(cause)
