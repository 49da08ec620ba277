"""Checks that the checkpoints which a run keeps fit on the disk, by an estimate from the model's size."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.clusters import starts_cluster
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.local_model import local_folder, read_size

GIB = 1 << 30
_MODEL = 2  # bytes of a parameter in bf16
_OPTIMIZER = 12  # bytes of a parameter: its fp32 copy and Adam's two moments


def check(args: SimpleNamespace) -> list[Finding]:
    """Return a finding where what the run keeps, or what it keeps while it writes, does not fit."""
    models = _models(args)
    if not models or not starts_cluster():
        return []  # nobody knows the size of the model, or which disk another machine writes to
    one, final = sum(_checkpoint_size(args, parameters) for parameters in models), _MODEL * models[0]
    folder, output = Path(args.ckpt.path), Path(args.ckpt.output_dir)
    number = _kept(args)
    kept = min(number * one, args.ckpt.max_mem * GIB + one)
    # A resumed run replaces what it has written before.
    free = shutil.disk_usage(nearest(folder)).free + _size_of(folder / "_actor") + _size_of(folder / "_critic")
    shares_disk = nearest(folder).stat().st_dev == nearest(output).stat().st_dev
    if shares_disk:
        kept += final
    elif final > (free_for_model := shutil.disk_usage(nearest(output)).free):
        problem = f"the model takes about {_gib(final)}, and {_gib(free_for_model)} are free"
        return [Finding("--ckpt.output_dir", args.ckpt.output_dir, problem, "choose another disk")]
    what = f"{number} checkpoints of {_gib(one)}" + (f" and the model, {_gib(final)}" if shares_disk else "")
    remedy = "free some, choose another disk, or lower --ckpt.max_num"
    if kept > free:
        problem = f"the run keeps about {_gib(kept)} ({what}), and {_gib(free)} are free"
        return [Finding("--ckpt.path", args.ckpt.path, problem, remedy)]
    if _saves(args) and kept + one > free:
        problem = (
            f"the run keeps about {_gib(kept)} ({what}), writes the next one beside them, and {_gib(free)} are free"
        )
        return [Finding("--ckpt.path", args.ckpt.path, problem, remedy, is_fatal=False)]
    return _check_copies(args, free - kept - one, final)


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _models(args: SimpleNamespace) -> list[int]:
    """Return the parameters of the models whose states are saved. None where one is not known."""
    names = [args.actor.model_name_or_path, args.critic.model_name_or_path]
    folders = [local_folder(name) for name in names if name]
    sizes = [read_size(folder) if folder else None for folder in folders]
    return [size.parameters for size in sizes if size] if all(sizes) else []


def _checkpoint_size(args: SimpleNamespace, parameters: int) -> int:
    if args.ckpt.disable_ds:
        return 0
    copies = 2 if args.train.enable_ema else 1
    return (_MODEL * copies + (0 if args.ds.lora.rank else _OPTIMIZER)) * parameters


def _saves(args: SimpleNamespace) -> bool:
    return args.ckpt.save_steps > 0 or args.ckpt.save_minutes is not None


def _kept(args: SimpleNamespace) -> int:
    """Return how many checkpoints are kept. Without any asked for, a signal still saves one."""
    evaluates = args.eval.dataset and args.eval.steps != -1 and args.ckpt.best_metric_key != "none"
    return max(1, (args.ckpt.max_num if _saves(args) else 0) + (1 if evaluates else 0))


def _check_copies(args: SimpleNamespace, free: float, copy: int) -> list[Finding]:
    """Say for how many of `--ckpt.save_hf`'s models there is room. OpenRLHF removes none."""
    if not args.ckpt.save_hf or not _saves(args):
        return []
    room = max(0, int(free // copy))
    if room >= 100:
        return []
    problem = (
        f"each checkpoint adds a model of about {_gib(copy)}, which is never removed, and there is room for {room}"
    )
    return [
        Finding("--ckpt.save_hf", True, problem, "remove old ones during the run, or leave it out", is_fatal=False)
    ]


def _size_of(folder: Path) -> int:
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
