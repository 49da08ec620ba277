"""vLLM's processes on the CPU: how they wait, and seeds of requests whose prompts are computed in parts."""

import os
import subprocess
import sys
import types

import pytest
import torch

from arlopti_openrlhf.cpu import vllm as cpu_vllm

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"


# Prints how many seconds it takes to ask and to answer 20 times.
ANSWER = """
import threading, time
asks, answers = (module.MessageQueue(1, 1, max_chunk_bytes=1024) for _ in range(2))

def answer():
    asked = module.MessageQueue.create_from_handle(asks.export_handle(), 0)
    asked.wait_until_ready(), answers.wait_until_ready()
    for _ in range(20):
        answers.enqueue(asked.dequeue(indefinite=True))

thread = threading.Thread(target=answer)
thread.start()
answered = module.MessageQueue.create_from_handle(answers.export_handle(), 0)
asks.wait_until_ready(), answered.wait_until_ready()
start = time.monotonic()
for number in range(20):
    asks.enqueue(number)
    assert answered.dequeue() == number
print(time.monotonic() - start)
thread.join()
"""
# Sends 50 notifications, each 0.5 ms after the one before has arrived, and prints how many arrive.
NOTIFY = """
import os, time, zmq
context, address = zmq.Context(), f"ipc://@arlopti-test-{os.getpid()}"
sender = module.SpinCondition(is_reader=False, context=context, notify_address=address)
reader = module.SpinCondition(is_reader=True, context=context, notify_address=address)
arrived = 0

def arrives():
    sender.notify()
    return bool(reader.poller.poll(20)) and bool(reader.local_notify_socket.recv())

while not arrives():  # until they are connected
    pass
for _ in range(50):
    time.sleep(0.0005)
    arrived += arrives()
print(arrived)
"""
# Waits for a message that does not come, 0.3 s after the last one, and prints for how many seconds it has worked, how
# often it has looked, and how often in the first 20 ms of a next wait, in that of five where it looked most often.
WAIT = """
import os, time, zmq
waiting = module.SpinCondition(is_reader=True, context=zmq.Context(), notify_address="inproc://nobody")
waiting.record_read()
worked = time.thread_time()

def looks(seconds):
    start, count = time.monotonic(), 0
    while time.monotonic() < start + seconds:
        waiting.wait(timeout_ms=5000)
        count += 1
    return count

of_first = looks(0.3)
worked = time.thread_time() - worked
of_next = []
for _ in range(5):
    looks(0.3)
    waiting.record_read()
    of_next.append(looks(0.02))
print(worked, of_first, max(of_next), flush=True)
os._exit(0)  # as it is, with its sockets open
"""


def run(first: str, *parts: str) -> list[list[float]]:
    """Run code in a process whose `module` is vLLM's, patched, and return the numbers that each part prints last."""
    code = f"from arlopti_openrlhf import cpu; {first}; cpu.enable(); import {BROADCAST} as module\n" + "".join(parts)
    environment = {name: value for name, value in os.environ.items() if name != "ARLOPTI_ENABLED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()[-len(parts) :]]


@pytest.fixture(scope="module")
def numbers() -> list[list[float]]:
    """Return what the three parts print in one process, which takes seconds to start."""
    return run("cpu.enable()", ANSWER, NOTIFY, WAIT)


def test_quick_answers_do_not_wait_for_a_notification_that_was_lost(numbers):
    """ZeroMQ drops about every second notification here, and each costs 5 s where nothing is done about it."""
    [seconds] = numbers[0]
    assert seconds < 2


def test_quick_notifications_arrive(numbers):
    """Where ZeroMQ is not made to check, no more than half of them do."""
    [arrived] = numbers[1]
    assert arrived > 35


@pytest.mark.parametrize("is_there", [False, True])
def test_a_process_that_waits_sleeps_whenever_it_imported_the_module(numbers, is_there):
    worked, looks, looks_of_next = run(f"import {BROADCAST}", WAIT)[0] if is_there else numbers[2]
    assert worked < 0.1  # it would spin for all of the 0.3 s
    assert looks > 10  # or else look once, and then be 5 s late where the notification was lost
    assert looks_of_next > 2  # the length of an earlier wait does not count


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
    cpu_vllm._patch_cpu_model_runner(types.SimpleNamespace(CPUModelRunner=CPUModelRunner))
    runner = CPUModelRunner(generators)
    assert runner._bookkeeping_sync([1]) == [1] and runner.input_batch.generators is generators
    with pytest.raises(ValueError):
        runner._bookkeeping_sync([1], fails=True)
    assert runner.input_batch.generators is generators
