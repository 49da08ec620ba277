"""Checks what the run needs of this machine besides GPUs: folders to write to, shared memory, disk."""

import logging.handlers
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.checkpoints.files import nearest, size_of
from arlopti_openrlhf.ops.preflight.finding import Finding, in_words
from arlopti_openrlhf.ops.preflight.model import num_parameters
from arlopti_openrlhf.ray_address import starts_cluster

_SHARED_MEMORY = 1 << 30  # bytes; NCCL and Ray's object store take it, and Docker gives 64 MiB
_LEAST_SHARED_MEMORY = 160 << 20  # bytes; vLLM's engine and one rank on a CPU
_MODEL = 2  # bytes of a parameter in bf16
_OPTIMIZER = 12  # bytes of a parameter: its fp32 copy and Adam's two moments


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what the machine lacks."""
    # On another machine's cluster the folders of the run may be others.
    for name in ("output_dir", "path"):
        if problem := _why_not_writable(Path(vars(args.ckpt)[name])):
            remedy = "give a folder that this user can write to"
            yield Finding.of(args, f"ckpt.{name}", problem, remedy, is_fatal=starts_cluster())
    folder = args.logger.tensorboard_dir
    if folder and (problem := _why_not_writable(Path(folder))):
        remedy = "give another folder, or train without curves"
        yield Finding.of(args, "logger.tensorboard_dir", problem, remedy, is_fatal=False)
    if starts_cluster():
        yield from _check_shared_memory()
        yield from _check_kernels()


def _check_shared_memory() -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        return
    size = shutil.disk_usage("/dev/shm")
    if size.free < _SHARED_MEMORY:
        from arlopti_openrlhf import cpu

        of_all = f"{size.free >> 20} MiB of {size.total >> 20} free, and vLLM, Ray and NCCL keep their buffers there"
        remedy = "give a container more (docker run --shm-size=16g), or remove what others have left there"
        # On a GPU, vLLM with one rank keeps little there, and Ray falls back to another folder.
        is_fatal = size.free < _LEAST_SHARED_MEMORY and cpu.uses_cpu()
        yield Finding("", "", f"/dev/shm has {of_all}", remedy, is_fatal)


def _check_kernels() -> Iterator[Finding]:
    """Load vLLM's kernels as its engine does, which warns of what it lacks, and ends at the first one it needs."""
    from vllm.platforms import current_platform

    warnings = logging.handlers.BufferingHandler(capacity=sys.maxsize)
    logging.getLogger("vllm").addHandler(warnings)
    current_platform.import_kernels()
    for record in warnings.buffer:
        remedy = "install the library that it misses, or a vLLM that fits this PyTorch and this machine"
        yield Finding("", "", record.getMessage(), remedy)


def _why_not_writable(folder: Path) -> str | None:
    """Return why the folder cannot be made or written to, or None."""
    there = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"nothing can be written to {there}: {error.strerror or error}"


def check_disk(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield a finding where what the run keeps, or what it keeps while it writes, does not fit."""
    models = args.actor.model_name_or_path, args.critic.model_name_or_path
    sizes = [num_parameters(name) for name in models if name]
    parameters = [size for size in sizes if size]
    if not parameters or len(parameters) < len(sizes) or not starts_cluster():
        return  # the size of the model is unknown, or the disk is another machine's
    copies = _MODEL * (2 if args.train.enable_ema else 1) + (0 if args.ds.lora.rank else _OPTIMIZER)
    one, final = 0 if args.ckpt.disable_ds else copies * sum(parameters), _MODEL * parameters[0]
    saves = args.ckpt.save_steps > 0
    evaluates = args.eval.dataset and args.eval.steps != -1 and args.ckpt.best_metric_key != "none"
    # Without any asked for, a signal still saves one.
    number = max(1, (args.ckpt.max_num if saves else 0) + (1 if evaluates else 0))
    kept = min(number * one, args.ckpt.max_mem * 2**30 + one)

    folder, output = Path(args.ckpt.path), Path(args.ckpt.output_dir)
    # A resumed run replaces what it has written before.
    free = shutil.disk_usage(nearest(folder)).free + size_of(folder / "_actor") + size_of(folder / "_critic")
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
