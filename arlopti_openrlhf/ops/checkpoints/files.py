"""Checkpoints on the disk: which are whole, which is the newest, and which to remove.

A checkpoint is a folder `global_step<N>` or `best_global_step<N>`, in `_actor` and, where there is a critic, in
`_critic` too. It is written under another name and renamed when it is whole, with a manifest of its files. Nothing
here needs a process group.
"""

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

MANIFEST = "manifest.json"
WRITING, REMOVING = ".writing-", ".removing-"  # prefixes of folders that are not whole
_PROBE = _BLOCK = 1 << 20  # bytes


def step_of(tag: str) -> int | None:
    """Return the step of a checkpoint's folder name, or None where it is no checkpoint's."""
    found = re.fullmatch(r"(?:best_)?global_step(\d+)", tag)
    return int(found[1]) if found else None


def is_best(tag: str) -> bool:
    return tag.startswith("best")


def tags(folder: Path) -> list[str]:
    """Return the names of the checkpoints in `folder`, whole or not."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and step_of(path.name) is not None)


def saved_in(path: Path) -> list[str]:
    """Return the names of the checkpoints and of the models next to them in `--ckpt.path`, by their steps."""
    models = [model.name for model in path.glob("*_hf") if step_of(model.name.removesuffix("_hf")) is not None]
    found = {*tags(path / "_actor"), *tags(path / "_critic"), *models}
    return sorted(found, key=lambda name: (step_of(name.removesuffix("_hf")), name))


def are_saved(args: SimpleNamespace | argparse.Namespace) -> bool:
    """Return whether a run saves checkpoints. Without `--ckpt.save_steps` it does so where a signal ends it.

    Args:
        args: upstream's, nested.
    """
    return not args.ckpt.disable_ds or args.ckpt.save_hf


def newest_first(folders: Sequence[Path]) -> list[str]:
    """Return the checkpoints that one of `folders` holds, in the order to try them: what was written last comes first.

    The manifest's serial number says so. The step would not do, because a run that starts again counts its steps
    from 1, next to what an earlier run has left. What is seen to be torn comes first and is named.
    """

    def order(tag: str) -> tuple[float, int, str]:
        serials = [_serial(folder / tag) for folder in folders if (folder / tag).is_dir()]
        return max(serials), step_of(tag) or 0, tag

    return sorted({tag for folder in folders for tag in tags(folder)}, key=order, reverse=True)


def newest_published(folders: Sequence[Path]) -> str | None:
    """Return the checkpoint that was written last of those that are in all `folders`, or None. No file is verified."""
    return next((tag for tag in newest_first(folders) if not _is_torn(folders, tag)), None)


def _is_torn(folders: Sequence[Path], tag: str) -> bool:
    """Return whether a checkpoint is missing in one of `folders`, or is seen to be torn there."""
    return any(not (folder / tag).is_dir() or _serial(folder / tag) == float("inf") for folder in folders)


def _serial(checkpoint: Path) -> float:
    try:
        return int(json.loads((checkpoint / MANIFEST).read_text("utf-8"))["serial"])
    except FileNotFoundError:  # OpenRLHF's own, or torn
        return 0 if list(checkpoint.glob("*_model_states.pt")) else float("inf")
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def names_in(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's files, except its manifest's, relative to it."""
    found = (str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


# Writing


def begin(writing: Path, say: Callable[[str], None]) -> int:
    """Make the folder to write a checkpoint to; return the bytes it will need, judged by the last, or 0."""
    folder = writing.parent
    folder.mkdir(parents=True, exist_ok=True)
    for line in clear_leftovers(folder):
        say(line)
    writing.mkdir()
    newest = newest_first([folder])
    return size_of(folder / newest[0]) if newest else 0


def describe(checkpoint: Path, names: Sequence[str]) -> dict[str, dict]:
    """Flush files to the disk and return {name: {"size": bytes, "sha256": hexadecimal}}."""
    described = {}
    for name in names:
        with (checkpoint / name).open("rb") as file:
            os.fsync(file.fileno())
            described[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": _sha256(file)}
    return described


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def publish(writing: Path, described: dict[str, dict]) -> None:
    """Write the manifest of a checkpoint and give it its name. Whatever interrupts this, no torn one has the name."""
    folder, checkpoint = writing.parent, writing.with_name(writing.name.removeprefix(WRITING))
    serial = 1 + max((n for tag in tags(folder) if (n := _serial(folder / tag)) < float("inf")), default=0)
    manifest = {"serial": int(serial), "files": described}
    _write_flushed(writing / MANIFEST, json.dumps(manifest, indent=1))
    _flush_folder(writing)
    if checkpoint.exists():
        remove(checkpoint)
    writing.rename(checkpoint)
    _flush_folder(folder)
    # OpenRLHF's and DeepSpeed's own tools read this. `newest_first` does not.
    beside = folder / ".latest"
    _write_flushed(beside, checkpoint.name)
    beside.rename(folder / "latest")


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Whatever interrupts this, no torn one has its name."""
    removing = checkpoint.with_name(REMOVING + checkpoint.name)
    shutil.rmtree(removing, ignore_errors=True)
    try:
        checkpoint.rename(removing)
    except FileNotFoundError:  # the other part's rank 0 has just removed it
        return
    shutil.rmtree(removing, ignore_errors=True)


def clear_leftovers(folder: Path) -> list[str]:
    """Finish what a process that was killed has begun; return a line for each.

    A folder with a manifest is whole: only its last renaming was missing, so it gets its name.
    """
    lines = []
    for path in sorted(folder.glob(f"{WRITING}*")):
        checkpoint = folder / path.name.removeprefix(WRITING)
        if (path / MANIFEST).exists() and not checkpoint.exists():
            path.rename(checkpoint)
            lines.append(f"{checkpoint} had been written, but not named")
        else:
            shutil.rmtree(path, ignore_errors=True)
            lines.append(f"removed {path}, which was never finished")
    for path in folder.glob(f"{REMOVING}*"):
        shutil.rmtree(path, ignore_errors=True)
    return lines


def cause_of(error: Exception, folder: Path) -> str:
    """Return why writing to `folder` failed.

    torch's writer says "iostream error" and nothing else. So a small file is written in its place. Its error has a
    number.
    """
    if not isinstance(error, OSError) or error.errno is None:
        probe = folder / f".probe-{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE))
                os.fsync(file.fileno())
        except OSError as found:
            error = found
        finally:
            probe.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)}: {error.filename or folder}"
    return f"{type(error).__name__}: {error}"


def check_room(folder: Path, needed: int) -> None:
    """Raise ENOSPC where fewer than `needed` bytes are free."""
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


# Reading


def problems(checkpoint: Path, ranks: int, share: slice = slice(None)) -> list[str]:
    """Return why a checkpoint is not whole, or nothing.

    With a manifest, every file's size and hash are compared. Without one, as OpenRLHF writes it, the files that
    DeepSpeed needs have to be there, and the checksums in them have to be right.

    Args:
        checkpoint: the folder.
        ranks: how many processes wrote it, which counts only without a manifest.
        share: which of the files to read. Several processes divide the work.
    """
    if not checkpoint.is_dir():
        return ["it is not there"]
    if not has_manifest(checkpoint):
        return _problems_without_manifest(checkpoint, ranks, share)
    try:
        files = json.loads((checkpoint / MANIFEST).read_text("utf-8"))["files"]
        expected = [(name, files[name]["size"], files[name]["sha256"]) for name in sorted(files)[share]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    return [reason for name, size, sha256 in expected if (reason := _difference(checkpoint, name, size, sha256))]


def has_manifest(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).exists()


def _difference(checkpoint: Path, name: str, size: int, sha256: str) -> str | None:
    try:
        with (checkpoint / name).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            return None if _sha256(file) == sha256 else f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _problems_without_manifest(checkpoint: Path, ranks: int, share: slice) -> list[str]:
    optimizer = sorted(checkpoint.glob("*_optim_states.pt"))
    models = sorted(checkpoint.glob("*_model_states.pt"))
    found = []
    if not models:
        found.append("it holds no *_model_states.pt")
    if optimizer and len(optimizer) != ranks:
        found.append(f"it holds {len(optimizer)} *_optim_states.pt for {ranks} ranks")
    for path in (models + optimizer)[share]:
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    found.append(f"{path.name}: a checksum is wrong")
        except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
            found.append(f"{path.name} cannot be read: {error}")
    return found


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
    if any(not (folder / newest).is_dir() for folder in folders):
        return
    old = [tag for tag in newest_first(folders) if tag != newest]

    def worth(tag: str) -> tuple[bool, bool, float]:
        value = metric(tag)
        return not _is_torn(folders, tag), value is not None, value or 0.0

    # Python's sort is stable, so the oldest comes first among equals.
    others = sorted((tag for tag in reversed(old) if not is_best(tag)), key=worth)
    if is_best(newest):
        going = [(tag, f"{newest} is better") for tag in old if is_best(tag)]
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
