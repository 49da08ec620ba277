"""Leaves no process of a run behind. A watcher waits for the driver's end, however it comes, and ends what is left.

Ray's raylet and GCS die with the driver. Its agents and vLLM's engines may not, and nobody else looks for them. All of
them inherit a variable from the driver that names the run, and by it the watcher knows them.

The watcher is this file, run as a script. It needs nothing but Python's own library, and starts within 0.1 s.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Names the run in the environment of each of its processes.
MARKER = "ARLOPTI_RUN"
# The driver leaves this file in the run's folder when the run is complete. The folder of any other run is kept.
COMPLETE = "complete"
_WATCHED = "watched"  # locked as long as a watcher lives
_KEPT = 3  # folders of runs that failed
_POLL = 0.25  # seconds
_GRACE = 3.0  # seconds from SIGTERM to SIGKILL
_GIVE_UP = 60.0  # seconds; a process that the kernel holds cannot be ended


def start(run: str) -> Path:
    """Start the watcher of this process, and mark all processes that this one will start.

    Args:
        run: the run's name, which no other run on this machine has.

    Returns:
        A new folder for the run's temporary files that only this user can enter. The watcher removes it.
    """
    base = _base()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    # In a session of its own, so that a signal to the driver's terminal or process group does not reach it. It holds
    # no file of the driver's, because whoever reads the driver's output waits until the last holder has closed it.
    subprocess.Popen(
        [sys.executable, "-ES", __file__, str(os.getpid()), run, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )
    os.environ[MARKER] = run
    return folder


def _prefix() -> str:
    return f"arlopti-{os.getuid()}-"


def _base() -> str:
    """Return where temporary files go. A path of up to 107 bytes leads to Ray's sockets, 73 below the run's folder."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return base if len(base) + len(_prefix()) + 10 + 73 <= 107 else "/tmp"


def watch(driver: int, run: str, folder: Path) -> None:
    """Wait for the end of `driver`, this process's parent, and then end the processes of `run` and tidy up."""
    with open(folder / _WATCHED, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while os.getppid() == driver:
            time.sleep(_POLL)
        end_processes(run)
        if (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
    _remove_oldest(folder.parent)


def end_processes(run: str) -> None:
    """End all processes of `run`, those that begin meanwhile too."""
    start_time = time.monotonic()
    while time.monotonic() - start_time < _GIVE_UP:
        found = list(processes(run))
        if not found:
            return
        for pid in found:
            is_late = time.monotonic() - start_time > _GRACE
            try:
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            except ProcessLookupError:
                pass
        time.sleep(_POLL)


def processes(run: str) -> Iterator[int]:
    """Yield this user's processes that carry the run's name. Each is looked at just before it is yielded."""
    # A process that renames itself overwrites the beginning of its environment, which so no longer is a list of
    # variables. The name of a run is found there all the same.
    mark = f"\0{MARKER}={run}\0".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid == os.getuid() and mark in b"\0" + Path(entry.path, "environ").read_bytes() + b"\0":
                yield int(entry.name)
        except OSError:  # it has ended, or belongs to another user
            continue


def _remove_oldest(base: Path) -> None:
    """Remove the folders of runs that failed, but for the last few and those of runs that go on."""
    folders = [folder for folder in base.glob(f"{_prefix()}*") if folder.lstat().st_uid == os.getuid()]
    for folder in sorted(folders, key=lambda folder: folder.lstat().st_mtime)[:-_KEPT]:
        try:
            with open(folder / _WATCHED) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
