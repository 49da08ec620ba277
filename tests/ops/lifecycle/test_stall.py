"""A run that reports nothing new for too long is ended, and the message says where it stood."""

import queue
from types import SimpleNamespace

import pytest
import ray

from arlopti_openrlhf.ops.lifecycle import stall
from arlopti_openrlhf.ops.lifecycle.progress import Phase, Progress, Step
from arlopti_openrlhf.ops.lifecycle.stopping import NotResponding


@pytest.fixture
def watched(monkeypatch):
    """Return watched(reports), which returns the cause, and after how many reports it came. A report takes 30 s."""

    def watch(reports: list) -> tuple[str, int]:
        seconds, said, causes = [0.0], iter(reports), []

        def sleep(_: float) -> None:
            seconds[0] += 30

        def read() -> Progress:
            report = next(said)
            if isinstance(report, Exception):
                raise report
            return report

        monkeypatch.setattr(stall.time, "sleep", sleep)
        monkeypatch.setattr(stall.time, "monotonic", lambda: seconds[0])
        monkeypatch.setattr(stall.progress, "read", read)
        stall._watch(causes.append, 1, [])
        [cause] = causes
        assert isinstance(cause, NotResponding) and cause.exit_code == 4
        return str(cause), int(seconds[0] / 30)

    return watch


STEP = Progress(step=Step(3, 24, ""))
ROLLOUTS, LATER = STEP._replace(phase=Phase("rollouts", 5)), STEP._replace(phase=Phase("rollouts", 6))


@pytest.mark.parametrize(
    ("reports", "place", "looks"),
    [
        ([Progress()] * 9, "the start", 3),
        ([ROLLOUTS] * 9, "rollouts after step 3, 5 samples finished", 4),
        # Each sample that is finished is progress.
        ([ROLLOUTS, ROLLOUTS, LATER, LATER, *[LATER] * 9], "rollouts after step 3, 6 samples finished", 6),
        # An outage of Ray's store, while which nothing is known.
        ([Progress(phase=Phase("update")), *[OSError()] * 9], "update before the first step's end", 4),
    ],
)
def test_where_it_stands_still(reports, place, looks, watched):
    assert watched(reports) == (f"{place}: no progress for 1 minutes (--train.stall_minutes)", looks)


@pytest.mark.whole_stack
def test_an_engine_that_cannot_start_ends_the_run(monkeypatch):
    @ray.remote(num_cpus=0)
    class Engine:
        def __init__(self, has_memory: bool) -> None:
            assert has_memory, "no memory for the cache"

    causes: queue.Queue[BaseException] = queue.Queue()
    monkeypatch.setattr(stall.launcher, "create_vllm_engines", lambda *given: [Engine.remote(each) for each in given])
    ray.init(num_cpus=1, include_dashboard=False)
    try:
        with stall.of_run(SimpleNamespace(end=causes.put), SimpleNamespace(train=SimpleNamespace(stall_minutes=60))):
            assert len(stall.launcher.create_vllm_engines(True, False)) == 2
        assert "no memory for the cache" in str(causes.get(timeout=60))
    finally:
        ray.shutdown()
