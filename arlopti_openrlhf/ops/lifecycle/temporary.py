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
    ended = [folder for folder in Path(place).glob(f"{_PREFIX}*") if _has_ended(folder)]
    for folder in sorted(ended, key=lambda folder: folder.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    fcntl.flock(os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    return folder


def _has_ended(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        with open(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # it runs, or is none of ours
        return False
