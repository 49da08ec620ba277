"""vLLM's processes on the CPU: how they wait, and seeds of requests whose prompts are computed in parts."""

import os
import subprocess
import sys
import types

import pytest
import torch

from arlopti_openrlhf import cpu_vllm

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"


# Waits for a message that does not come, 0.3 s after the last one, and prints for how many seconds it has worked.
WAIT = """
import os, time, zmq
waiting = module.SpinCondition(is_reader=True, context=zmq.Context(), notify_address="inproc://nobody")
waiting.record_read()
start, worked = time.monotonic(), time.thread_time()
while time.monotonic() < start + 0.3:
    waiting.wait(timeout_ms=100)
print(time.thread_time() - worked, flush=True)
os._exit(0)  # as it is, with its sockets open
"""


@pytest.mark.parametrize("first", ["cpu.enable()", f"import {BROADCAST}"])
def test_a_process_that_waits_sleeps_whenever_it_imported_the_module(first):
    code = f"from arlopti_openrlhf import cpu; {first}; cpu.enable(); import {BROADCAST} as module\n{WAIT}"
    environment = {name: value for name, value in os.environ.items() if name != "ARLOPTI_ENABLED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 0.1  # it would spin for all of the 0.3 s


def test_a_generator_is_not_turned_back():
    """As vLLM does after a part of a prompt, which PyTorch refuses for the CPU."""

    class CPUModelRunner:
        def __init__(self, generators):
            self.input_batch = types.SimpleNamespace(generators=generators)

        def _bookkeeping_sync(self, tokens, fails=False):
            for generator in self.input_batch.generators.values():
                generator.set_offset(generator.get_offset() - 4)
            if fails:
                raise ValueError
            return tokens

    generators = {0: torch.Generator()}
    with pytest.raises(RuntimeError, match="CPU Generator"):
        CPUModelRunner(generators)._bookkeeping_sync([1])
    cpu_vllm._patch_cpu_model_runner(lambda module: None, types.SimpleNamespace(CPUModelRunner=CPUModelRunner))
    runner = CPUModelRunner(generators)
    assert runner._bookkeeping_sync([1]) == [1] and runner.input_batch.generators is generators
    with pytest.raises(ValueError):
        runner._bookkeeping_sync([1], fails=True)
    assert runner.input_batch.generators is generators
