"""Replaces what vLLM's own processes do on the CPU. `arlopti_openrlhf.cpu.patches` makes the replacements.

vLLM imports the modules before it loads plugins, so these patches also work on a module that is there already.
"""

import functools
import time
from typing import Any


def _patch_shm_broadcast(module: Any) -> None:
    """Let vLLM's engine and worker sleep while they wait for each other.

    Each would spin for up to a second after the last message, and so keep a core busy for as long as a rollout lasts.
    A sleeping reader relies on a ZeroMQ notification. vLLM queues at most one, and ZeroMQ flushes about once per
    millisecond, so the second of two messages within a millisecond is never announced. The reader would find it at
    its own next look, which comes every 5 s. So here the sender makes ZeroMQ flush, and the reader looks whenever its
    wait has grown by a tenth.
    """
    from zmq.constants import EVENTS

    class SleepCondition(module.SpinCondition):
        _waits_since: float | None = None  # by the monotonic clock

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"busy_loop_s": 0.0})

        def record_read(self) -> None:
            super().record_read()
            self._waits_since = None

        def wait(self, timeout_ms: int | None = None) -> None:
            now = time.monotonic()
            self._waits_since = self._waits_since or now
            tenth = 1 + int(100 * (now - self._waits_since))
            super().wait(tenth if timeout_ms is None else min(tenth, timeout_ms))

        def notify(self) -> None:
            self.local_notify_socket.get(EVENTS)  # which makes ZeroMQ check
            super().notify()

    module.SpinCondition = SleepCondition


def _patch_cpu_model_runner(module: Any) -> None:
    """Let the prompt of a request with a seed be computed in parts, as it is where many are sent at once.

    vLLM throws away the token that it samples after such a part, and turns the request's generator back. PyTorch
    cannot do that on the CPU. Here a generator stays where it is. A seed still gives the same tokens where vLLM
    computes the same requests together, and `--train.deterministic` needs no more.
    """
    bookkeeping = module.CPUModelRunner._bookkeeping_sync

    @functools.wraps(bookkeeping)
    def without_generators(self, *args, **kwargs):
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    module.CPUModelRunner._bookkeeping_sync = without_generators


PATCHES = {
    "vllm.distributed.device_communicators.shm_broadcast": _patch_shm_broadcast,
    "vllm.v1.worker.cpu_model_runner": _patch_cpu_model_runner,
}
