"""A dead, failed, halted or stuck actor ends the run with its cause; one that works for long does not."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import ray
import torch
from arlopti_testing.processes import wait_until
from ray.experimental import internal_kv

from arlopti_openrlhf.ops.lifecycle import heartbeat, watch
from arlopti_openrlhf.ops.lifecycle.heartbeat import with_heartbeat
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding, RunStopped
from arlopti_openrlhf.ops.lifecycle.watch import Watch
from arlopti_openrlhf.ops.rollouts.reward_client import RewardExecutor

pytestmark = pytest.mark.whole_stack  # for their time
long = pytest.mark.long  # each waits for some ten seconds

LIMIT = 6  # seconds without a sign of life, or without progress
LONG = LIMIT + 3


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
        self.output_processor = SimpleNamespace(request_states={})

    async def is_sleeping(self):
        self.process.stdin.write(b"?\n")
        if not await asyncio.to_thread(self.process.stdout.readline):
            raise ConnectionError("the engine's process has ended")

    async def generate(self, seconds, tokens_per_second):
        """A request that takes so long."""
        tokens = []
        self.output_processor.request_states["1"] = SimpleNamespace(
            detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens))
        )
        for _ in range(seconds):
            await asyncio.sleep(1)
            tokens += [0] * tokens_per_second


@ray.remote
class Engine:
    async def __init__(self, seconds=0.0, error=None):
        self.llm, self.executor = Core(), RewardExecutor()
        if error:
            raise error
        time.sleep(seconds)  # blocks the actor, as vLLM's start does
        await self.llm.is_sleeping()

    async def pids(self):
        return os.getpid(), self.llm.process.pid

    async def generate_responses(self, seconds, tokens_per_second):
        await self.llm.generate(seconds, tokens_per_second)

    async def reward(self, seconds):
        self.executor.calls += 1
        await asyncio.sleep(seconds)
        self.executor.calls -= 1


def use_the_cpu(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@ray.remote
class Rank:
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)

    def init_model_from_pretrained(self):
        pass

    def pid(self):
        return os.getpid()

    def fit(self, work, *args):
        """A call that is not the first of its method is no start."""
        return work(self.model, *args)

    def compile(self, seconds):
        use_the_cpu(seconds)


@ray.remote
class Controller:
    def fit(self, rank, *args):
        return ray.get(rank.fit.remote(*args))

    def log(self, seconds):
        time.sleep(seconds)


RANK = with_heartbeat(Rank, heartbeat.Rank, "policy")
ENGINE = with_heartbeat(Engine, heartbeat.Engine, "vLLM engine")


class Work:
    """What a rank may be busy with for so many seconds."""

    @staticmethod
    def sleep(model, seconds):
        time.sleep(seconds)

    @staticmethod
    def loop(model, seconds):
        use_the_cpu(seconds)

    @staticmethod
    def modules(model, seconds):
        for _ in range(seconds):
            model(torch.ones(2))
            time.sleep(1)

    @staticmethod
    def gradients(model, seconds):
        for _ in range(seconds):
            model.weight.sum().backward()
            time.sleep(1)

    @staticmethod
    def writing(model, seconds):
        with open("/dev/null", "wb") as file:
            for _ in range(seconds):
                file.write(bytes(heartbeat._BLOCK))
                time.sleep(1)


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
    key = heartbeat.prefix() + handle._actor_id.hex()
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


@pytest.fixture(scope="module")
def actors():
    """A controller, a rank and an engine that have started, and that have nothing to do when a test is over."""
    started = SimpleNamespace(
        controller=with_heartbeat(Controller, heartbeat.Controller, "controller").remote(),
        rank=RANK.remote(),
        engine=ENGINE.remote(),
    )
    ray.get(started.controller.fit.remote(started.rank, Work.sleep, 0))
    ray.get([started.rank.init_model_from_pretrained.remote(), started.engine.pids.remote()])
    return started


@long
def test_actors_that_wait_for_their_place_have_nothing_to_do_and_end_are_no_cause(start, actors):
    start(RANK.options(num_cpus=99))
    assert wait_for_cause(LONG)[0] is None


WORKS = {
    "modules": lambda actors: actors.controller.fit.remote(actors.rank, Work.modules, LONG),
    "gradients": lambda actors: actors.controller.fit.remote(actors.rank, Work.gradients, LONG),
    "writing": lambda actors: actors.controller.fit.remote(actors.rank, Work.writing, LONG),
    "the first call of a method, as a compiler": lambda actors: actors.rank.compile.remote(LONG),
    "tokens": lambda actors: actors.engine.generate_responses.remote(LONG, 5),
    "a reward, which has a limit of its own": lambda actors: actors.engine.reward.remote(LONG),
}


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[] if name == "tokens" else long, id=name) for name, call in WORKS.items()]
)
def test_an_actor_that_works_for_long_is_no_cause(call, actors):
    call = call(actors)
    assert wait_for_cause(LONG)[0] is None
    ray.get(call)


HANGS = {
    "sleep": ("policy", "sleep", lambda a: a.controller.fit.remote(a.rank, Work.sleep, 2 * LIMIT)),
    "loop": ("policy", "use_the_cpu", lambda a: a.controller.fit.remote(a.rank, Work.loop, 2 * LIMIT)),
    "a tracker": ("controller", "log", lambda a: a.controller.log.remote(2 * LIMIT)),
    "no token comes": ("vLLM engine", None, lambda a: a.engine.generate_responses.remote(2 * LIMIT, 0)),
}


@pytest.mark.parametrize(
    ("who", "innermost", "call"),
    [pytest.param(*case, marks=[] if name == "sleep" else long, id=name) for name, case in HANGS.items()],
)
def test_an_actor_that_hangs_is_named_with_its_place_and_not_the_controller_that_waits(who, innermost, call, actors):
    call = call(actors)
    cause, seconds = wait_for_cause(2 * LIMIT)
    assert isinstance(cause, NotResponding) and seconds >= LIMIT and "no progress for" in str(cause)
    assert str(cause).startswith(f"{who} (process ") and str(cause).count("(process ") == 1
    assert innermost is None or f", in {innermost} (test_watch.py:" in str(cause)
    ray.get(call)


@long
def test_a_machine_that_slept_is_no_cause(actors):
    """A watch that is halted together with the actors does not look meanwhile."""
    looks, pid = Watch(LIMIT), ray.get(actors.rank.pid.remote())
    call = actors.rank.fit.remote(Work.modules, 2 * LIMIT)
    assert looks.look() is None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    os.kill(pid, signal.SIGCONT)
    for _ in range(LIMIT):
        assert looks.look() is None
        time.sleep(1)
    ray.get(call)


@long
@pytest.mark.parametrize("which", [pytest.param(0, id="the actor"), pytest.param(1, id="its engine's process")])
def test_a_stopped_engine(start, which):
    pid = ray.get(start(ENGINE).pids.remote())[which]
    os.kill(pid, signal.SIGSTOP)
    try:
        cause, seconds = wait_for_cause()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(cause, NotResponding) and seconds < 3 * LIMIT
    assert "vLLM engine (process" in str(cause) and "no sign of life for" in str(cause)


@long
def test_an_actor_that_stops_at_once(start, tmp_path):
    path = tmp_path / "pid"
    wait_for_constructor(start(with_heartbeat(EngineThatStops, heartbeat.Engine, "vLLM engine"), path))
    try:
        cause, seconds = wait_for_cause()
    finally:
        os.kill(pid := int(path.read_text()), signal.SIGCONT)
    assert f"vLLM engine (process {pid} on" in str(cause) and "no sign of life for" in str(cause)


@long
def test_an_actor_that_never_gets_to_its_constructor(start):
    start(with_heartbeat(RankThatImportsForLong, heartbeat.Rank, "policy"))
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and "RankThatImportsForLong (process" in str(cause)


def test_a_process_that_imports_has_a_heartbeat_by_its_cpu_time():
    program = "import sys\nfor line in sys.stdin:\n for _ in range(10**7): pass\n print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        here, looks = ray.util.get_node_ip_address(), Watch(LIMIT)
        looks._has_worked("actor", process.pid, here, 1.0)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        assert looks._has_worked("actor", process.pid, here, 2.0)  # for more than a twentieth of the second
        assert not looks._has_worked("actor", process.pid, here, 3.0)
        assert not looks._has_worked("another", process.pid, "another node", 1.0)
        process.stdin.close()


@long
def test_an_engine_that_is_stuck_in_its_start(start):
    wait_for_constructor(start(ENGINE, 60.0))
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and "vLLM engine (process" in str(cause)


@long
def test_a_stopped_rank_is_named(start):
    ranks = [start(RANK) for _ in range(2)]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    os.kill(pids[1], signal.SIGSTOP)
    try:
        cause, seconds = wait_for_cause(limit=2 * LIMIT)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert f"policy (process {pids[1]} on" in str(cause) and str(pids[0]) not in str(cause)


@long
def test_an_engine_whose_process_was_killed(start):
    pid, core = ray.get(start(ENGINE).pids.remote())
    os.kill(core, signal.SIGKILL)
    cause, seconds = wait_for_cause()
    assert isinstance(cause, NotResponding) and f"vLLM engine (process {pid} on" in str(cause)
    assert "Error: " in str(cause)


# From here on Ray remembers dead actors.


def test_a_rank_that_was_killed_ends_the_run_once(start):
    causes = []
    pid = ray.get(start(RANK).pid.remote())
    watch.start(causes.append, LIMIT)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: causes, seconds=20)
    time.sleep(3)
    assert len(causes) == 1 and isinstance(causes[0], NotResponding)
    assert f"policy (process {pid}" in str(causes[0]) and "has died" in str(causes[0])


@long
def test_an_engine_that_fails_in_its_constructor(start):
    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    start(ENGINE, 0.0, ValueError("utilization 1.5:\n  must be below 1"))
    cause, seconds = wait_for_cause(300, limit=300)  # a new cluster starts its first worker, and the worker imports
    assert type(cause) is RunStopped and cause.exit_code == 1
    assert str(cause).endswith("ValueError: utilization 1.5: must be below 1") and "vLLM engine" in str(cause)
