"""Leaves no process of a run behind. A watcher waits for the driver's end, however it comes, and ends what is left.

Ray's raylet and GCS die with the driver. Its agents and vLLM's engines may not, and nothing else looks for them. All
of them inherit a variable from the driver that names the run, by which the watcher knows them. Some processes of Ray
and vLLM overwrite their environment with a title. The watcher knows those by their logs in the run's folder.

The watcher is this file, run as a script. It needs nothing but Python's own library, and starts within 0.1 s.
"""

import contextlib
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
from typing import Any

# Names the run in the environment of each of its processes.
MARKER = "ARLOPTI_RUN"
_TITLES = (b"ray::", b"VLLM::")  # of the processes that rename themselves
# The driver leaves this file in the run's folder when the run is complete. The folder of any other run is kept.
COMPLETE = "complete"
_WATCHED = "watched"  # locked as long as a watcher lives
_KEPT = 3  # folders of runs that failed
_POLL = 0.25  # seconds
_GRACE = 3.0  # seconds from SIGTERM to SIGKILL
_GIVE_UP = 60.0  # seconds; a process that the kernel holds cannot be ended


def of_run(run: Any, args: object) -> None:
    """Watch over the processes of a run (`driver.Driver`), whose files only its user can read."""
    os.umask(0o077)
    run.folder = start(run.name)


def start(run: str) -> Path:
    """Start the watcher of this process, and mark all processes that this one will start with the run's unique name.

    Return a new folder for the run's temporary files, which only this user can enter. The watcher removes it.
    """
    base = _base()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    # In a session of its own, so a signal to the driver's terminal or process group does not reach it. It holds
    # no file of the driver's, because a reader of the driver's output waits until the last holder has closed it.
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
    base = os.path.abspath(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())  # the watcher works elsewhere
    return base if len(base) + len(_prefix()) + 10 + 73 <= 107 else "/tmp"


def watch(driver: int, run: str, folder: Path) -> None:
    """Wait for the end of `driver`, this process's parent, and then end the processes of `run` and tidy up."""
    with open(folder / _WATCHED, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while os.getppid() == driver:
            time.sleep(_POLL)
        end_processes(run, folder)
        if (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
    _remove_oldest(folder.parent)


def end_processes(run: str, folder: Path) -> None:
    """End all processes of the run that owns this folder, including those that begin meanwhile."""
    times_none = 0
    # By the number of looks, and not by a clock, which runs on while the machine sleeps.
    for look in range(round(_GIVE_UP / _POLL)):
        found = list(processes(run, folder))
        times_none = 0 if found else times_none + 1
        if times_none == 2:  # one that is just executing another program has no environment
            return
        for pid in found:
            is_late = look * _POLL > _GRACE
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        time.sleep(_POLL)


def processes(run: str, folder: Path) -> Iterator[int]:
    """Yield this user's processes that belong to the run. Each is examined just before it is yielded."""
    for process in Path("/proc").glob("[0-9]*"):
        is_ours = False
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            is_ours = process.stat().st_uid == os.getuid() and (_is_marked(process, run) or _logs_to(process, folder))
        if is_ours and int(process.name) != os.getpid():
            yield int(process.name)


def _is_marked(process: Path, run: str) -> bool:
    """Return whether a process, given as its folder in /proc, has the run's name in its environment."""
    # What is left of an overwritten environment need not begin with a variable.
    return f"\0{MARKER}={run}\0".encode() in b"\0" + (process / "environ").read_bytes() + b"\0"


def _logs_to(process: Path, folder: Path) -> bool:
    """Return whether a process, given as its folder in /proc, has such a title and an open file in the run's folder.

    Without the title it may be the user, who reads a log.
    """
    if not (process / "cmdline").read_bytes().startswith(_TITLES):
        return False
    prefix = f"{folder.resolve()}/"
    return any(os.readlink(file).startswith(prefix) for file in (process / "fd").iterdir())


def _remove_oldest(base: Path) -> None:
    """Remove the folders of runs that failed, except for the last few and those of runs that have not ended."""
    folders = []
    for folder in base.glob(f"{_prefix()}*"):
        with contextlib.suppress(FileNotFoundError):  # another run's watcher has removed it
            status = folder.lstat()
            if status.st_uid == os.getuid():
                folders.append((status.st_mtime, folder))
    for _, folder in sorted(folders)[:-_KEPT]:
        with contextlib.suppress(OSError), open(folder / _WATCHED) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
