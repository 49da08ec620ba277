"""Compares the flags of a run that is resumed with those that it had.

The prompts themselves are compared where they are loaded (`ops.rollouts.prompts`).
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from arlopti_openrlhf import __version__
from arlopti_openrlhf.cli import config_file, flags
from arlopti_openrlhf.cli.flags import Change
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.preflight.finding import Finding

_Values = dict[str, str | list]


def check_checkpoint(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield why the newest checkpoint of the run that is resumed cannot be loaded. Nothing of it is unpickled."""
    if not args.ckpt.load_enable or args.ds.use_universal_ckpt:  # DeepSpeed's tool writes those
        return
    from arlopti_openrlhf.ops.checkpoints import unpickling  # imports PyTorch

    parts = checkpoint_files.folders_of(Path(args.ckpt.path), args)
    newest = checkpoint_files.newest_published([part for part in parts if part.is_dir()])
    for checkpoint in (part / newest for part in parts if newest):
        version = checkpoint_files.version_of(checkpoint)
        if version and version > Version(__version__):
            problem = f"version {version} of arlopti_openrlhf has written {newest}, and this is {__version__}"
            yield Finding("--ckpt.path", args.ckpt.path, problem, "install that version, or give another path")
            return
        named = {file: unpickling.not_allowed(file) for file in sorted(checkpoint.glob("*.pt"))}
        for file, names in named.items():
            if names and not checkpoint_files.problems(checkpoint):  # otherwise it is passed over
                yield Finding("--ckpt.path", file, *unpickling.refusal(names))


def stored(args: SimpleNamespace) -> _Values:
    """Return the values that the checkpoints of the run that is resumed hold, whatever is given now."""
    with suppress(OSError, ValueError, TypeError):  # `check` says so
        had = config_file.of_resumed(args)
        return {key: value for key, value in had.items() if flags.of(key).change is Change.STORED}
    return {}


def check(flat: argparse.Namespace, args: SimpleNamespace) -> list[Finding]:
    """Return a finding for each flag that differs from what the run had, if the run cannot go on with the new value.

    Args:
        flat: the flags as the parser has returned them.
        args: upstream's nested arguments, as its `train` gets them.
    """
    try:
        had = config_file.of_resumed(args)
        return [*_moved(flat, args), *(_differences(had, flat, args) if had else [])]
    except (OSError, ValueError, TypeError) as error:  # the last two for a torn file, which may have any value
        problem = f"the flags of the run that is resumed cannot be read ({error})"
        return [Finding("--ckpt.path", args.ckpt.path, problem, "compare them yourself", is_fatal=False)]


def _moved(flat: argparse.Namespace, args: SimpleNamespace) -> Iterator[Finding]:
    """Yield that a run's file names another folder than its own: the run would start anew there, or another go on."""
    if not args.ckpt.load_enable or not flat.config:
        return
    file = Path(flat.config)
    named = config_file.read(file.read_text("utf-8")).get("ckpt.path")
    is_own = args.ckpt.path != named or Path(named).resolve() == file.parent.resolve()
    if not is_own and checkpoint_files.saved_in(file.parent):
        problem = f"--config lies beside the checkpoints of {file.parent.absolute()}"
        yield Finding("--ckpt.path", named, problem, f"give --ckpt.path {file.parent.absolute()}, or another file")


def _differences(had: dict[str, Any], flat: argparse.Namespace, args: SimpleNamespace) -> list[Finding]:
    has = config_file.read(config_file.text(flat))
    keys = sorted(key for key in had.keys() | has.keys() if _comparable(had.get(key)) != _comparable(has.get(key)))
    return [finding for key in keys if (finding := _difference(key, had, has, args))]


def _difference(key: str, had: _Values, has: _Values, args: SimpleNamespace) -> Finding | None:
    flag, before, now = f"--{key}", _shown(had.get(key)), _shown(has.get(key))
    problem, change, model = f"the run that is resumed had {before}", flags.of(key).change, key.partition(".")[0]
    is_layout = change is Change.LAYOUT or (change is Change.RANKS and _ranks(model, had) != _ranks(model, has))
    if is_layout and not args.ds.use_universal_ckpt:
        problem += ", and DeepSpeed cannot load its checkpoints otherwise"
        remedy = f"give {before}, or convert one by DeepSpeed's ds_to_universal and add --ds.use_universal_ckpt"
        return Finding(flag, now, problem, remedy)
    is_place = change is Change.PLACE or (change is Change.PASSES and _passes(had) != _passes(has))
    if is_place and not args.ckpt.load_changed:
        problem += ", and its place in the prompts or in the learning rate's schedule counts in that"
        return Finding(flag, now, problem, f"give {before}, or add --ckpt.load_changed to go on with {now}")
    if change is Change.STORED:
        return Finding(flag, now, problem, f"it goes on with {before}, which its checkpoints hold", is_fatal=False)
    return None


def _comparable(value: str | list | None) -> Any:
    """Return numbers for their text: a default may be 0 where its flag reads 0.0."""
    if isinstance(value, list):
        return [_comparable(part) for part in value] or None
    try:
        return value and float(value)
    except ValueError:
        return value


def _shown(value: str | list | None) -> str:
    return "no value" if value in (None, []) else " ".join(value) if isinstance(value, list) else value


def _passes(values: _Values) -> int:
    """Return how many optimizer steps a mini-batch takes. A token method in a file may take more."""
    by_flags = "algo.lopti.eta" in values or "algo.lopti.quantile" in values
    takes_one = values.get("algo.lopti.groups") != "both" or any(
        argument in ("lopti.groups=low", "lopti.groups=high") for argument in values.get("algo.token_method_args", ())
    )
    return 2 if (by_flags or "lopti" in values.get("algo.token_method", ())) and not takes_one else 1


def _ranks(model: str, values: _Values) -> int:
    nodes, gpus = (int(str(values.get(f"{model}.{name}", 0))) for name in ("num_nodes", "num_gpus_per_node"))
    has_model = model == "actor" or values.get("algo.advantage.estimator") == "gae"  # whose critic may be the actor's
    return nodes * gpus if has_model else 0
