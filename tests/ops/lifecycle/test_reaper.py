"""No process of a run outlives its driver, and no other process is touched."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from arlopti_testing.processes import wait_until

from arlopti_openrlhf.ops.lifecycle import reaper

# A driver whose child starts a grandchild in a session of its own. Both ignore SIGTERM.
RUN = f"run-{uuid.uuid4().hex}"
DRIVER = (
    f"RUN = {RUN!r}"
    + """
import os, subprocess, sys, time
from arlopti_openrlhf.ops.lifecycle import reaper
folder = reaper.start(RUN)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
grandchild = ignore + "print('up', flush=True); time.sleep(600)"
child = ignore + f'''
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
print("up", flush=True)
time.sleep(600)
'''
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(folder, flush=True)
sys.stdin.read()
(folder / reaper.COMPLETE).touch()
"""
)


@pytest.fixture
def driver(tmp_path):
    """Return a driver that runs, with the folder of its run. It ends where its standard input does."""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)} | {reaper.MARKER: "another"}
    environment["PYTHONPATH"] = str(Path(reaper.__file__).parents[3])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    yield driver, Path(driver.stdout.readline().strip())
    driver.kill()
    driver.wait()
    driver.stdout.close()


def running(folder: Path) -> list[int]:
    return list(reaper.processes(RUN, folder))


def test_a_killed_driver_takes_its_processes_along(driver):
    process, folder = driver
    assert len(running(folder)) == 2 and folder.stat().st_mode & 0o777 == 0o700
    with subprocess.Popen(["sleep", "60"], env=os.environ | {reaper.MARKER: f"{RUN}-2"}) as bystander:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wait_until(lambda: not running(folder))
        assert bystander.poll() is None
        bystander.kill()
    assert wait_until(lambda: not watchers(folder))
    assert folder.exists()  # its logs may say why


def test_a_relative_folder_is_that_of_the_driver(monkeypatch):
    """The watcher works in another one."""
    monkeypatch.chdir("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", ".")
    assert reaper._base() == "/tmp"


def test_a_complete_run_leaves_nothing(driver):
    process, folder = driver
    process.stdin.close()
    assert process.wait(10) == 0
    assert wait_until(lambda: not running(folder) and not folder.exists())
    assert wait_until(lambda: not watchers(folder))


def test_a_process_that_overwrites_its_environment_is_known_by_its_log(tmp_path):
    """Ray's agents do. A user who reads a log of the run stays, and so does another run's agent."""
    run, another = tmp_path / "run", tmp_path / "run2"
    children = []
    for title, folder in (("ray::DashboardAgent", run), ("ray::DashboardAgent", another), ("tail", run)):
        folder.mkdir(exist_ok=True)
        with open(folder / "agent.out", "a") as log:
            code = [title, "-c", "import time; time.sleep(600)"]
            children.append(subprocess.Popen(code, executable=sys.executable, env={}, stdout=log))
    try:
        assert list(reaper.processes(RUN, run)) == [children[0].pid]
    finally:
        for child in children:
            child.kill()
            child.wait()


def watchers(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes().decode())
    return [line for line in found if str(folder) in line]


def test_a_process_that_is_missed_once_is_ended(tmp_path, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        looks = iter([[], [process.pid], [], []])
        monkeypatch.setattr(reaper, "processes", lambda *_: next(looks))
        reaper.end_processes("", tmp_path)
        assert process.wait(10) == -signal.SIGTERM


def test_folders_of_the_last_failed_runs_are_kept(tmp_path):
    folders = [tmp_path / f"{reaper._prefix()}{i}" for i in range(reaper._KEPT + 3)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        (folder / reaper._WATCHED).touch()
        os.utime(folder, (i, i))
    somebody = tmp_path / "arlopti-x"
    somebody.mkdir()
    with open(folders[0] / reaper._WATCHED) as lock:
        reaper.fcntl.flock(lock, reaper.fcntl.LOCK_EX)  # its run goes on
        reaper._remove_oldest(tmp_path)
    assert [folder for folder in folders if folder.exists()] == [folders[0], *folders[3:]]
    assert somebody.exists()
