"""The folder of a run's temporary files, such as Ray's logs and sockets."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _LOCK, _KEPT = "arlopti-", "run.lock", 2


def make_folder() -> Path:
    """Return a new folder, which only this user can enter. Remove those of older runs.

    A run holds a lock in its folder until its process ends. The last two folders that nobody holds stay.
    """
    place = os.environ.get("RAY_TMPDIR", "/tmp")  # sockets: short paths
    ended = [(since, folder) for folder in Path(place).glob(f"{_PREFIX}*") if (since := _ended_at(folder))]
    for _, folder in sorted(ended)[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    fcntl.flock(os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    return folder


def _ended_at(folder: Path) -> float | None:
    """Return when the folder of a run that has ended was last changed."""
    try:
        found = folder.lstat()
        with open(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return found.st_mtime if found.st_uid == os.getuid() else None
    except OSError:  # it runs, or is none of ours, or another run has just removed it
        return None
