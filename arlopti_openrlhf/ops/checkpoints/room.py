"""Says whether a file system has room for more files. It may have bytes for them, and no inodes."""

import os
from pathlib import Path


def has_no_inode(folder: Path) -> bool:
    """Return whether no inode is left below a folder, or the nearest of its parents that exists."""
    free = os.statvfs(nearest(folder))
    return free.f_files > 0 and free.f_favail == 0


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = folder.absolute()
    return next(there for there in (path, *path.parents) if there.exists())
