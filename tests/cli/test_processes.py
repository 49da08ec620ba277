"""Commands leave their output in a log, and the memory that they take is counted."""

import subprocess
import sys
import time

import pytest

from arlopti_openrlhf.cli.processes import Log, PeakMemory


def test_every_line_is_logged_and_shown_as_it_comes(tmp_path):
    log, lines = Log(tmp_path / "log"), []
    log.run(
        "command",
        [sys.executable, "-c", "print('1%', end='\\r'); print('2%', end='\\r'); print('done')"],
        lines.append,
    )
    assert [line.strip() for line in lines] == ["1%", "2%", "done"]
    assert log.path.read_text("utf-8").endswith("1%\n2%\ndone\n")


def test_a_command_that_fails_ends_the_program_with_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text("for i in range(30): print('line', i)\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit, match=r"line 29\n\narlopti train failed with status 3: .*log") as stop:
        Log(tmp_path / "log").run("arlopti train", [sys.executable, "-m", "failing"], lambda line: None)
    assert "line 10" not in str(stop.value)


def test_memory_counts_the_processes_that_were_started():
    memory = PeakMemory()
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(2**28); input()"], stdin=subprocess.PIPE)
    deadline = time.time() + 60
    while memory.gib < 0.25 and time.time() < deadline:
        time.sleep(0.2)
    child.communicate(b"\n")
    assert 0.25 < memory.gib < 64
