"""Checks what the run needs of this machine beside GPUs: packages, folders, open files, an address, shared memory."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from arlopti_openrlhf.ops.preflight import disk
from arlopti_openrlhf.ops.preflight.clusters import starts_cluster
from arlopti_openrlhf.ops.preflight.finding import Finding

# What OpenRLHF pins, and what a run is made of.
_PACKAGES = ("torch", "ray", "vllm", "deepspeed", "transformers")
# Linux's default. With one rank of a tiny model, vLLM's engine has 102 open files, and Ray's raylet 75.
_OPEN_FILES = 1024
_SHARED_MEMORY = 1 << 30  # bytes; NCCL and Ray's object store take it, and Docker gives 64 MiB


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what the machine lacks."""
    findings = [*_check_packages(args), *_check_folders(args), *_check_caches()]
    if starts_cluster():
        findings += [*_check_temporary(), *_check_open_files(), *_check_shared_memory()]
    else:
        findings += _check_address(os.environ["RAY_ADDRESS"])
    return findings


def _check_packages(args: SimpleNamespace) -> list[Finding]:
    needed = list(_PACKAGES)
    needed += ["tensorboard"] if args.logger.tensorboard_dir else []
    needed += ["wandb"] if args.logger.wandb.key else []
    findings = [
        Finding("", "", f"{name} is not installed", "install the stack, as with make setup")
        for name in needed
        if importlib.util.find_spec(name) is None
    ]
    for text in importlib.metadata.requires("openrlhf") or ():
        requirement = Requirement(text)
        if requirement.name not in _PACKAGES:
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:  # vLLM's builds have several names
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problem = f"{requirement.name} {installed} is installed, and OpenRLHF asks for {requirement.specifier}"
            remedy = f"pip install '{requirement.name}{requirement.specifier}' if the run fails"
            findings.append(Finding("", "", problem, remedy, is_fatal=False))
    return findings


def _check_folders(args: SimpleNamespace) -> list[Finding]:
    """Check that what the run writes can be written. On another machine's cluster its folders may be others."""
    folders = {"--ckpt.output_dir": args.ckpt.output_dir, "--ckpt.path": args.ckpt.path}
    if args.logger.tensorboard_dir:
        folders["--logger.tensorboard_dir"] = args.logger.tensorboard_dir
    findings = []
    for flag, folder in folders.items():
        if problem := _why_not_writable(Path(folder)):
            remedy = "give a folder that this user can write to"
            findings.append(Finding(flag, folder, problem, remedy, is_fatal=starts_cluster()))
    return findings


def _check_caches() -> list[Finding]:
    """Check the folders below HOME, or where variables lead them, without which a run ends in its first minute."""
    home = os.path.expanduser("~")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))
    hugging_face = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    folders = {
        "HF_DATASETS_CACHE": (hugging_face / "datasets", "datasets prepares the prompts there"),
        "TORCH_EXTENSIONS_DIR": (cache / "torch_extensions", "PyTorch builds DeepSpeed's C++ ops there"),
    }
    findings = []
    for variable, (default, why) in folders.items():
        folder = Path(os.environ.get(variable) or default)
        if problem := _why_not_writable(folder):
            name, value = (variable, folder) if os.environ.get(variable) else ("HOME", home)
            findings.append(Finding(name, value, f"{folder}: {problem}, and {why}", f"set {variable}, or HOME"))
    return findings


def _check_temporary() -> list[Finding]:
    """Check the folder for temporary files. Python would take another than TMPDIR names, and not say so."""
    return [
        Finding(name, folder, problem, "make it, or name a folder that this user can write to")
        for name in ("RAY_TMPDIR", "TMPDIR")
        if (folder := os.environ.get(name))
        and (problem := _why_not_writable(Path(folder)) if os.path.isdir(folder) else "there is no such folder")
    ]


def _check_open_files() -> list[Finding]:
    """Check how many files a process may open. Ray raises its own limit as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _OPEN_FILES:
        return []
    problem = f"a process may open {most} files, and the processes of Ray and vLLM need more"
    return [Finding("", "", problem, f"raise the hard limit: ulimit -Hn {_OPEN_FILES}, or more")]


def _why_not_writable(folder: Path) -> str | None:
    """Return why the folder cannot be made or written to, or None."""
    try:
        there = disk.nearest(folder)
        if not there.is_dir():
            return f"{there} is a file"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"nothing can be written there: {error.strerror or error}"


def _check_address(address: str) -> list[Finding]:
    """Check that the cluster which RAY_ADDRESS names answers."""
    if address == "auto":
        return []
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        with socket.create_connection((parts.hostname or "", parts.port or 10001), timeout=3):
            return []
    except (OSError, ValueError) as error:
        remedy = "start the cluster, correct the address, or unset RAY_ADDRESS to run on this machine alone"
        return [Finding("RAY_ADDRESS", address, f"no Ray cluster answers there ({error})", remedy)]


def _check_shared_memory() -> list[Finding]:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:  # another system than Linux
        return []
    if size >= _SHARED_MEMORY:
        return []
    problem = f"/dev/shm holds {size >> 20} MiB, and Ray's objects and NCCL's buffers are kept there"
    return [Finding("", "", problem, "give a container more (docker run --shm-size=16g)", is_fatal=False)]
