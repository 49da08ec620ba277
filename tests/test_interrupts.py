"""A command that is asked to end does so with one line, from its first statement on."""

import os
import signal
import subprocess
import sys

import pytest

COMMANDS = {
    "train": "-m arlopti_openrlhf.cli.train_ppo_ray --help",
    "arlopti": "-m arlopti_openrlhf data --generate --people 8 --train 200000 --out {}",
}
# Stops a command in its first statement behind `answer`, as a user might by chance.
STOPPED = """
import os, runpy, sys, time
from arlopti_openrlhf import interrupts
answer = interrupts.answer
def answer_and_wait():
    answer()
    os.write(1, b"up\\n")
    while True:  # a signal that comes just before a wait is handled after it
        time.sleep(0.1)
interrupts.answer = answer_and_wait
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def listening() -> None:
    """Ignore no signal, whatever has started the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(command: list[str]) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=listening)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_statement_of_a_command_answers(command, tmp_path):
    words = COMMANDS[command].format(tmp_path).split()
    with start([sys.executable, "-c", STOPPED, *words[1:]]) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == "arlopti_openrlhf: SIGINT received\n"


def test_what_a_command_has_started_ends_with_it_in_the_middle_of_an_import_too():
    program = """
import subprocess, sys
sys.modules["psutil"] = type(sys)("psutil")  # as an import that has just begun leaves it
from arlopti_openrlhf import interrupts
interrupts.answer()
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"])
print(child.pid, flush=True)
child.wait()
"""
    with start([sys.executable, "-c", program]) as process:
        assert process.stdout
        first = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    [child] = first - {"up"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
