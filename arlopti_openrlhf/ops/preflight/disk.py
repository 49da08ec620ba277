"""Checks that the checkpoints which a run keeps fit on the disk, by an estimate from the model's size."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.clusters import starts_cluster
from arlopti_openrlhf.ops.preflight.finding import Finding, in_words
from arlopti_openrlhf.ops.preflight.local_model import model_size

_GIB = 1 << 30
_MODEL = 2  # bytes of a parameter in bf16
_OPTIMIZER = 12  # bytes of a parameter: its fp32 copy and Adam's two moments


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield a finding where what the run keeps, or what it keeps while it writes, does not fit."""
    sizes = [model_size(name) for name in (args.actor.model_name_or_path, args.critic.model_name_or_path) if name]
    parameters = [size.parameters for size in sizes if size]
    if not parameters or len(parameters) < len(sizes) or not starts_cluster():
        return  # the size of the model is unknown, or the disk is another machine's
    copies = _MODEL * (2 if args.train.enable_ema else 1) + (0 if args.ds.lora.rank else _OPTIMIZER)
    one, final = 0 if args.ckpt.disable_ds else copies * sum(parameters), _MODEL * parameters[0]
    saves = args.ckpt.save_steps > 0 or args.ckpt.save_minutes is not None
    evaluates = args.eval.dataset and args.eval.steps != -1 and args.ckpt.best_metric_key != "none"
    # Without any asked for, a signal still saves one.
    number = max(1, (args.ckpt.max_num if saves else 0) + (1 if evaluates else 0))
    kept = min(number * one, args.ckpt.max_mem * _GIB + one)

    folder, output = Path(args.ckpt.path), Path(args.ckpt.output_dir)
    # A resumed run replaces what it has written before.
    free = shutil.disk_usage(nearest(folder)).free + _size_of(folder / "_actor") + _size_of(folder / "_critic")
    what = f"{number} checkpoints of {in_words(one)}"
    if nearest(folder).stat().st_dev == nearest(output).stat().st_dev:
        kept += final
        what += f" and the model, {in_words(final)}"
    elif final > (free_for_model := shutil.disk_usage(nearest(output)).free):
        problem = f"the model takes about {in_words(final)}, and {in_words(free_for_model)} are free"
        yield Finding.of(args, "ckpt.output_dir", problem, "choose another disk")
        return
    needed = kept + (one if saves else 0)
    if needed > free:
        while_it_writes = "" if kept > free else ", writes the next one in addition"
        problem = f"the run keeps about {in_words(kept)} ({what}){while_it_writes}, and {in_words(free)} are free"
        remedy = "free some, choose another disk, or lower --ckpt.max_num"
        yield Finding.of(args, "ckpt.path", problem, remedy, is_fatal=kept > free)
    elif saves and args.ckpt.save_hf and (room := int((free - needed) // final)) < 100:
        each = f"each checkpoint adds a model of about {in_words(final)}, which is never removed"
        remedy = "remove old ones during the run, or leave it out"
        yield Finding.of(args, "ckpt.save_hf", f"{each}, and there is room for {room}", remedy, is_fatal=False)


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = folder.absolute()
    return next(there for there in (path, *path.parents) if there.exists())


def _size_of(folder: Path) -> int:
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names)
