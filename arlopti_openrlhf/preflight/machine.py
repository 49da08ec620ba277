"""Checks what the run needs of this machine beside GPUs: packages, folders, a cluster's address, shared memory."""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from arlopti_openrlhf.preflight import disk
from arlopti_openrlhf.preflight.finding import Finding
from arlopti_openrlhf.preflight.placement import starts_cluster

# What OpenRLHF pins, and what a run is made of.
_PACKAGES = ("torch", "ray", "vllm", "deepspeed", "transformers")
_SHARED_MEMORY = 1 << 30  # bytes; NCCL and Ray's object store take it, and Docker gives 64 MiB


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what the machine lacks."""
    findings = [*_check_packages(args), *_check_folders(args)]
    if starts_cluster():
        findings += _check_shared_memory()
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
