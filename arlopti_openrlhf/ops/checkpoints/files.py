"""Checkpoints on the disk: which are whole, which is the newest, and which to remove.

A checkpoint is a folder `global_step<N>` or `best_global_step<N>`, in `_actor` and, where there is a critic, in
`_critic` too. It is written under another name and renamed when it is whole, with a manifest of its files. Nothing
here needs a process group.
"""

import argparse
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from arlopti_openrlhf import __version__

MANIFEST = "manifest.json"
KEPT = "config.yaml"  # in --ckpt.path: the flags of the last start (`cli.config_file`)
WRITING, REMOVING = ".writing-", ".removing-"  # prefixes of folders that are not whole
_PROBE = 1 << 20  # bytes
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # what JSON that is missing or torn raises


def step_of(tag: str) -> int | None:
    """Return the step of a checkpoint's folder name, or None where it is no checkpoint's."""
    match = re.fullmatch(r"(?:best_)?global_step(\d+)", tag)
    return int(match[1]) if match else None


def tags(folder: Path) -> list[str]:
    """Return the names of the checkpoints in `folder`, whole or not."""
    return sorted(path.name for path in folder.glob("*") if path.is_dir() and step_of(path.name) is not None)


def saved_in(path: Path) -> list[str]:
    """Return the names of the checkpoints and of the models next to them in `--ckpt.path`, by their steps."""
    models = [model.name for model in path.glob("*_hf") if step_of(model.name.removesuffix("_hf")) is not None]
    names = {*tags(path / "_actor"), *tags(path / "_critic"), *models}
    return sorted(names, key=lambda name: (step_of(name.removesuffix("_hf")), name))


def are_saved(args: SimpleNamespace | argparse.Namespace) -> bool:
    """Return whether a run saves checkpoints, if only where a signal ends it. `args` are upstream's, nested."""
    return not args.ckpt.disable_ds or args.ckpt.save_hf


def folders_of(path: Path, args: SimpleNamespace | argparse.Namespace) -> list[Path]:
    """Return the folders of a run's checkpoints in `path`, which is --ckpt.path. `args` are upstream's, nested."""
    return [path / "_actor", *([path / "_critic"] if args.critic.model_name_or_path else [])]


def newest_of(args: SimpleNamespace | argparse.Namespace) -> Path | None:
    """Return the checkpoint of a run that was written last, in the actor's folder, or None."""
    folders = folders_of(Path(args.ckpt.path), args)
    tag = newest_published(folders)
    return folders[0] / tag if tag else None


def is_published(args: SimpleNamespace | argparse.Namespace, tag: str) -> bool:
    """Return whether a checkpoint is written, or True if this machine cannot tell. By name: NFS may list it late."""
    path = Path(args.ckpt.path)
    return args.ckpt.disable_ds or not path.exists() or _serial(folders_of(path, args), tag) < math.inf


def newest_first(folders: Sequence[Path]) -> list[str]:
    """Return the checkpoints of `folders` in the order to try them: what was written last comes first.

    The manifest's serial number says so. The step would not do, because a run that starts again counts its steps
    from 1, next to what an earlier run has left. What is missing in one of `folders`, or is seen to be torn there,
    comes before all others, so that it is named.
    """
    return sorted({tag for folder in folders for tag in tags(folder)}, key=lambda t: (_serial(folders, t), t))[::-1]


def newest_published(folders: Sequence[Path]) -> str | None:
    """Return the checkpoint that was written last of those that are in all `folders`, or None. No file is verified."""
    return next((tag for tag in newest_first(folders) if _serial(folders, tag) < math.inf), None)


def is_past_universal(folder: Path) -> bool:
    """Return whether a checkpoint was written after DeepSpeed's tool had made the last universal one in `folder`."""
    newest, universal = newest_published([folder]), _universal(folder)
    if newest is None or universal is None:
        return False
    return _manifest(folder / newest).get("universal") == universal


def _universal(folder: Path) -> str | None:
    """Return the name of the last universal checkpoint in a folder."""
    latest = folder / "latest_universal"
    return latest.read_text("utf-8") if latest.exists() else None


def _serial(folders: Sequence[Path], tag: str) -> float:
    """Return a checkpoint's serial number: infinity where it is not in all `folders`, or is seen to be torn."""
    try:
        return max(_manifest(folder / tag)["serial"] for folder in folders)
    except _UNREADABLE:
        return math.inf


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the serial number, files and version of a checkpoint. It raises one of `_UNREADABLE`."""
    manifest = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    if not (isinstance(manifest["files"], dict) and manifest["files"]):
        raise ValueError("it names no files")
    if not isinstance(manifest["serial"], int):
        raise ValueError("its serial number is none")
    return manifest


def version_of(checkpoint: Path) -> Version | None:
    """Return the version of this package that wrote a checkpoint, or None if its manifest cannot be read."""
    try:
        return Version(_manifest(checkpoint)["version"])
    except _UNREADABLE:
        return None


def flags_of(checkpoint: Path) -> str | None:
    """Return the content of `KEPT` with which the run had started that wrote a checkpoint, or None."""
    try:
        return _manifest(checkpoint).get("flags")
    except _UNREADABLE:
        return None


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = folder.absolute()
    return next(there for there in (path, *path.parents) if there.exists())


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def size_needed(folder: Path) -> int:
    """Return the bytes that the next checkpoint in `folder` will need, judged by the last, or 0."""
    newest = newest_published([folder])
    return size_of(folder / newest) if newest else 0


# Writing


def begin(writing: Path, say: Callable[[str], None]) -> None:
    """Make the folder to write a checkpoint or a model to.

    Raises:
        OSError: there is no room for another checkpoint.
    """
    folder = writing.parent
    folder.mkdir(parents=True, exist_ok=True)
    for line in clear_leftovers(folder):
        say(line)
    writing.mkdir()
    if shutil.disk_usage(folder).free < size_needed(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def publish(writing: Path, flags: str | None = None) -> None:
    """Flush a checkpoint's files, write its manifest and give it its name, which no torn one gets at any interruption.

    The manifest has the size of each file, which tells a torn one from a whole one, and the run's flags.
    """
    described = {}
    for path in sorted(path for path in writing.rglob("*") if path.is_file()):
        flush(path)
        described[str(path.relative_to(writing))] = {"size": path.stat().st_size}
    folder, checkpoint = writing.parent, writing.with_name(writing.name.removeprefix(WRITING))
    newest = newest_published([folder])
    serial = 1 + int(_serial([folder], newest)) if newest else 1
    manifest = {"serial": serial, "version": __version__, "universal": _universal(folder), "flags": flags}
    manifest["files"] = described
    write(writing / MANIFEST, json.dumps(manifest, indent=1))
    if checkpoint.exists():
        remove(checkpoint)
    writing.rename(checkpoint)
    flush(folder)
    write(folder / "latest", checkpoint.name)  # for DeepSpeed's own tools. `newest_first` does not read it


def write(path: Path, text: str) -> None:
    """Write a small file that only this user can read. A power loss leaves the old content or the new, whole."""
    writing = path.with_name(f".{path.name}")
    writing.unlink(missing_ok=True)
    writing.touch(0o600)
    writing.write_text(text, "utf-8")
    flush(writing)
    writing.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Whatever interrupts this, no torn one has its name."""
    removing = checkpoint.with_name(REMOVING + checkpoint.name)
    _remove(removing)
    try:
        checkpoint.rename(removing)
    except FileNotFoundError:  # the other part's rank 0 has just removed it
        return
    _remove(removing)


def _remove(folder: Path) -> None:
    """Remove a folder. Of one that a user has moved elsewhere and linked here, only the link goes."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(folder: Path) -> list[str]:
    """Finish what a process that was killed has begun; return a line for each.

    A folder with a whole manifest is whole: only its last renaming was missing, so it gets its name.
    """
    lines = []
    for path in sorted([*folder.glob(f"{WRITING}*"), *folder.glob(f"{REMOVING}*")]):
        checkpoint = folder / path.name.removeprefix(WRITING)
        if path.name.startswith(WRITING) and not checkpoint.exists() and _serial([folder], path.name) < math.inf:
            path.rename(checkpoint)
            lines.append(f"{checkpoint} had been written, but not named")
        else:
            _remove(path)
            lines.append(f"cannot remove {path}" if path.exists() else f"removed what was left of {path}")
    return lines


def cause_of(error: Exception, folder: Path) -> str:
    """Return why writing to `folder` failed.

    torch's writer says "iostream error" and nothing else. So a small file is written in its place, whose error has
    the cause.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE))
            os.fsync(file.fileno())
    except OSError as cause:
        error = cause
    finally:
        probe.unlink(missing_ok=True)
    return f"{type(error).__name__}: {error}"


# Reading


def problems(checkpoint: Path) -> list[str]:
    """Return why a checkpoint is not whole, or nothing. Every file's size is compared with the manifest's."""
    if not checkpoint.is_dir():
        return ["it is not there"]
    if not (checkpoint / MANIFEST).exists():
        # The place in the prompts that OpenRLHF keeps is none that a run of ours could go on from.
        return [f"it has no {MANIFEST}: it is torn, or from a run of OpenRLHF's own command"]
    try:
        sizes = {name: entry["size"] for name, entry in sorted(_manifest(checkpoint)["files"].items())}
    except _UNREADABLE as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"]
    reasons = []
    for name, size in sizes.items():
        try:
            if (now := (checkpoint / name).stat().st_size) != size:
                reasons.append(f"{name} had {size} bytes when it was written, and has {now} now")
        except FileNotFoundError:
            reasons.append(f"{name} is missing")
        except (OSError, ValueError) as error:  # a ValueError for what is no file's name
            reasons.append(f"{name} cannot be read: {error}")
    return reasons


# Rotation


def rotate(
    folders: Sequence[Path], newest: str, max_num: int, max_gib: float, metric: Callable[[str], float | None]
) -> Iterator[str]:
    """Remove the checkpoints beyond the limits, now that `newest` is whole; yield a line for each.

    The rule is OpenRLHF's: the newest of the best ones stays, and `max_num` of the others. Those without a metric go
    first, then the worst, then the oldest. `newest` stays whatever its metric is. Nothing goes while `newest` is not
    whole in all `folders`: where there is a critic, the part that ends last rotates both.

    Args:
        folders: `_actor`, and `_critic` where there is one.
        newest: the checkpoint that has just been written.
        max_num: `--ckpt.max_num`.
        max_gib: `--ckpt.max_mem`, for each folder.
        metric: returns a checkpoint's metric.
    """
    if _serial(folders, newest) == math.inf:
        return

    def worth(tag: str) -> tuple[bool, bool, float]:
        value = metric(tag)
        return _serial(folders, tag) < math.inf, value is not None, value or 0.0

    # Python's sort is stable, so the oldest comes first among equals.
    old = sorted((tag for tag in reversed(newest_first(folders)) if tag != newest), key=worth)
    others = [tag for tag in old if not tag.startswith("best")]
    if newest.startswith("best"):
        going = [(tag, f"{newest} is better") for tag in old if tag not in others]
    else:
        excess = max(0, len(others) + 1 - max(max_num, 1))
        going = [(tag, f"--ckpt.max_num {max_num}") for tag in others[:excess]]
        others = others[excess:]
    for tag, why in going:
        yield _removed(folders, tag, why)
    for tag in others:
        if max(map(size_of, folders)) <= max_gib * 1024**3:
            break
        yield _removed(folders, tag, f"--ckpt.max_mem {max_gib:g}")


def _removed(folders: Sequence[Path], tag: str, why: str) -> str:
    for folder in folders:
        remove(folder / tag)
    return f"removed checkpoint {tag} ({why})"
