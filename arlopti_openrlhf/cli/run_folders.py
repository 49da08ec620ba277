"""Keeps a run's folders its own: what another run has left there stays, and no two runs write there at once.

--ckpt.path holds the checkpoints, and --ckpt.output_dir the final model. The command holds a lock in each of them as
long as it lives.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli import config_file
from arlopti_openrlhf.cli.processes import InUse, lock, look
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.preflight.check import refuse_if_fatal
from arlopti_openrlhf.ops.preflight.finding import Finding

LOCK = ".run.lock"
_PATH, _OUTPUT = "--ckpt.path", "--ckpt.output_dir"
_MODEL = ("config.json", "adapter_config.json")  # one of them is in every model's folder


def check(args: SimpleNamespace) -> list[Finding]:
    """Return which of the run's folders another run writes to, or hold what it has left. Nothing is made.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    found = []
    for flag, folder in _folders(args):
        try:
            with suppress(OSError):  # it has no locks
                look(folder / LOCK)
        except InUse as process:
            found.append(_in_use(flag, folder, process))
    return found or [*_check_checkpoints(args), *_check_models(args)]


@contextmanager
def held(args: SimpleNamespace, process: int) -> Iterator[None]:
    """Hold the locks of the run's folders while the context lasts. The folders are made.

    Args:
        process: whom to signal to end the run.

    Raises:
        SystemExit: with status 2, after a line on standard error, where another run holds one.
    """
    # By its real path, because a second lock of the same file would be refused.
    folders = {os.path.realpath(folder): (flag, folder) for flag, folder in _folders(args)}
    with ExitStack() as stack:
        for flag, folder in folders.values():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(lock(folder / LOCK, process))
            except InUse as process:
                refuse_if_fatal([_in_use(flag, folder, process)])
            except OSError as error:
                line = f"{folder} has no lock ({error}), so that a second run there would not be noticed."
                terminal.say(line, file=sys.stderr)
        yield


def _in_use(flag: str, folder: Path, process: InUse) -> Finding:
    problem = f"a run that goes on writes there, process {process} ({folder / LOCK})"
    return Finding(flag, folder, problem, "wait for its end, or give another path")


def _folders(args: SimpleNamespace) -> list[tuple[str, Path]]:
    """Return the folders that the run writes to or resumes from, with their flags."""
    found = [(_OUTPUT, folder) for folder in _models(args)]
    if checkpoint_files.are_saved(args) or args.ckpt.load_enable:
        found.append((_PATH, Path(args.ckpt.path)))
    return found


def _models(args: SimpleNamespace) -> list[Path]:
    """Return the folders of the final models."""
    models = [args.ckpt.output_dir]
    if args.critic.model_name_or_path and args.critic.save_value_network:
        models.append(f"{args.ckpt.output_dir}_critic")  # as upstream
    return list(map(Path, models))


def _check_checkpoints(args: SimpleNamespace) -> list[Finding]:
    """Refuse a new run next to the checkpoints of another, which it would rotate away and mix with its own."""
    if args.ckpt.load_enable or not checkpoint_files.are_saved(args):
        return []
    found = checkpoint_files.saved_in(Path(args.ckpt.path))
    if not found:
        return []
    problem = f"it holds another run's checkpoints, up to {found[-1]}"
    return [Finding(_PATH, args.ckpt.path, problem, "resume that run with --ckpt.load_enable, or give another path")]


def _check_models(args: SimpleNamespace) -> list[Finding]:
    """Refuse a run that would replace another run's final model. A resumed run may replace its own."""
    findings = []
    for folder in _models(args):
        names = [name for name in _MODEL if (folder / name).is_file()]
        if names and not _is_own(folder, args):
            remedy = "resume that run with --ckpt.load_enable and its --ckpt.path, or move it, or give another path"
            findings.append(Finding(_OUTPUT, folder, f"it holds another run's model ({names[0]})", remedy))
    return findings


def _is_own(model: Path, args: SimpleNamespace) -> bool:
    """Return whether the run that is resumed saves its final model there too, as its flags say."""
    try:
        had = config_file.of_resumed(args)
    except (OSError, ValueError):  # a run of OpenRLHF's own
        return True
    kept = str(had.get("ckpt.output_dir"))
    return bool(had) and os.path.realpath(model) in (os.path.realpath(kept), os.path.realpath(f"{kept}_critic"))
