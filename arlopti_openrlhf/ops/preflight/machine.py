"""Checks what the run needs of this machine besides GPUs: packages, folders, open files, shared memory, disk."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from packaging.requirements import Requirement

from arlopti_openrlhf.ops.checkpoints.files import size_of
from arlopti_openrlhf.ops.checkpoints.room import has_no_inode, nearest
from arlopti_openrlhf.ops.preflight.finding import Finding, in_words
from arlopti_openrlhf.ops.preflight.model import model_size
from arlopti_openrlhf.ray_address import starts_cluster

# What OpenRLHF pins, and what a run is made of.
_PACKAGES = ("torch", "ray", "vllm", "deepspeed", "transformers")
# Linux's default. With one rank of a tiny model, vLLM's engine has 102 open files, and Ray's raylet 75.
_OPEN_FILES = 1024
_SHARED_MEMORY = 1 << 30  # bytes; NCCL and Ray's object store take it, and Docker gives 64 MiB
_LEAST_SHARED_MEMORY = 160 << 20  # bytes; vLLM's engine and one rank on a CPU
_OBJECT_STORE, _LARGEST_OBJECT_STORE = 0.3, 200e9  # of the memory, and in bytes: Ray's default
_LOOPBACK_SECONDS = 2.0
_INODES = 200  # a run of one rank on a CPU has some 90 in TMPDIR, and 13 below --ckpt.path
_MODEL = 2  # bytes of a parameter in bf16
_OPTIMIZER = 12  # bytes of a parameter: its fp32 copy and Adam's two moments


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what the machine lacks."""
    yield from _check_packages(args)
    # On another machine's cluster the folders of the run may be others.
    for flag in ("ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir"):
        group, _, name = flag.partition(".")
        folder = vars(vars(args)[group])[name]
        if folder and (problem := _why_not_writable(Path(folder))):
            remedy = "give a folder that this user can write to"
            yield Finding.of(args, flag, problem, remedy, is_fatal=starts_cluster())
    yield from _check_caches()
    if starts_cluster():
        yield from _check_own_cluster()
        yield from _check_cuda_toolkit(args)


def _check_packages(args: SimpleNamespace) -> Iterator[Finding]:
    needed = {"tensorboard": args.logger.tensorboard_dir, "wandb": args.logger.wandb.key}
    for name in (*_PACKAGES, *filter(needed.get, needed)):
        if importlib.util.find_spec(name) is None:
            yield Finding("", "", f"{name} is not installed", "install the stack, as with make setup")
    for requirement in map(Requirement, importlib.metadata.requires("openrlhf") or ()):
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:  # vLLM's builds have several names
            continue
        if requirement.name in _PACKAGES and not requirement.specifier.contains(installed, prereleases=True):
            problem = f"{requirement.name} {installed} is installed, and OpenRLHF asks for {requirement.specifier}"
            remedy = f"pip install '{requirement.name}{requirement.specifier}' if the run fails"
            yield Finding("", "", problem, remedy, is_fatal=False)


def _check_caches() -> Iterator[Finding]:
    """Check the folders below HOME, or where variables lead them, without which a run ends in its first minute."""
    home = os.path.expanduser("~")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))
    hugging_face = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    for variable, default, why in (
        ("HF_DATASETS_CACHE", hugging_face / "datasets", "datasets prepares the prompts there"),
        ("TORCH_EXTENSIONS_DIR", cache / "torch_extensions", "PyTorch builds DeepSpeed's C++ ops there"),
    ):
        folder = Path(os.environ.get(variable) or default)
        if problem := _why_not_writable(folder):
            name, value = (variable, folder) if os.environ.get(variable) else ("HOME", home)
            yield Finding(name, value, f"{folder}: {problem}, and {why}", f"set {variable}, or HOME", starts_cluster())


def _check_own_cluster() -> Iterator[Finding]:
    """Check what Ray's processes need on the machine that they start on."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        # Python would take another folder than TMPDIR names, and not say so.
        folder = os.environ.get(name)
        is_there = folder and os.path.isdir(folder)
        problem = _why_not_writable(Path(folder)) if folder and is_there else "there is no such folder"
        if folder and problem:
            yield Finding(name, folder, problem, "make it, or name a folder that this user can write to")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit as far as it may
    if most != resource.RLIM_INFINITY and most < _OPEN_FILES:
        problem = f"a process may open {most} files, and the processes of Ray and vLLM need more"
        yield Finding("", "", problem, f"raise the hard limit: ulimit -Hn {_OPEN_FILES}, or more")
    if problem := _loopback_problem():
        remedy = "bring it up: ip link set lo up, ip address add 127.0.0.1/8 dev lo"
        yield Finding("", "", f"127.0.0.1 does not answer, by which the run's processes talk ({problem})", remedy)
    yield from _check_shared_memory()
    yield from _check_file_size()


def _check_cuda_toolkit(args: SimpleNamespace) -> Iterator[Finding]:
    """Check for the CUDA toolkit where there is a GPU. DeepSpeed builds its Adam with it when the actor starts."""
    from arlopti_openrlhf import cpu

    deepspeed = importlib.util.find_spec("deepspeed")
    if cpu.uses_cpu() or deepspeed is None or not deepspeed.submodule_search_locations or args.actor.optim != "adam":
        return  # Muon takes PyTorch's Adam where it finds no other
    from torch.utils import cpp_extension

    op = "cpu_adam" if args.ds.adam_offload else "fused_adam"
    is_built = any(Path(deepspeed.submodule_search_locations[0], "ops/adam").glob(f"{op}_op*.so"))
    home = cpp_extension.CUDA_HOME
    # g++ compiles the Adam on the CPU, but DeepSpeed asks nvcc for its version there, too.
    if not is_built and not (home and Path(home, "bin/nvcc").exists()):
        problem = f"DeepSpeed builds its {op} with the CUDA toolkit, which is not there"
        yield Finding("CUDA_HOME", home or "", problem, "install that of PyTorch's CUDA, or set CUDA_HOME to it")


def _loopback_problem() -> str | None:
    """Return why no process of this machine reaches another by IPv4, or None."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


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


def _check_file_size() -> Iterator[Finding]:
    """Check the limit of a file's size, of which Ray's object store is the first: one file of a fixed size."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    store = min(_OBJECT_STORE * memory, _LARGEST_OBJECT_STORE)
    problem = f"a file may have {in_words(limit)} at most"
    if limit < store:
        problem += f", and Ray's object store takes up to {in_words(store)} in one"
    else:
        problem += ", and what is larger in a checkpoint or model cannot be written"
    yield Finding("", "", problem, "raise the limit: ulimit -f unlimited", is_fatal=limit < store)


def _why_not_writable(folder: Path) -> str | None:
    """Return why the folder cannot be made or written to, or None."""
    try:
        there = nearest(folder)
        if not there.is_dir():
            return f"{there} is a file"
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        no_inodes = ", because no inode is free (df -i)" if has_no_inode(there) else ""
        return f"nothing can be written there: {error.strerror or error}{no_inodes}"
    free = os.statvfs(there)
    if free.f_files and free.f_favail < _INODES:  # some file systems have no fixed number of them
        return f"{free.f_favail} inodes are free there (df -i), and a run makes some {_INODES} files and folders"
    return None


def check_disk(args: SimpleNamespace) -> Iterator[Finding]:
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
