"""The machine: its name, its versions, its memory."""

import ctypes
import importlib.metadata
import os
import platform
import socket
from pathlib import Path

import torch

from arlopti_openrlhf import cpu


def keep_freed_memory(keep: bool) -> None:
    """Whether C's allocator keeps what tensors free for the next ones, as it does by itself, or returns it at once.

    Only then is resident memory what is in use, whatever ran before; it costs time, in page faults.
    """
    if cpu.uses_cpu():
        mmap_threshold, trim_threshold = -3, -1  # of mallopt; glibc arrives at the first values by itself
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**25 if keep else 2**20)
        ctypes.CDLL(None).mallopt(trim_threshold, 2**26 if keep else 2**17)


def type_of_products() -> torch.dtype:
    """The type that matrix products of bf16 weights are computed in here."""
    return torch.float32 if cpu.uses_cpu() and not cpu.multiplies_bf16() else torch.bfloat16


def synchronize() -> None:
    if not cpu.uses_cpu():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Let `peak_gib` count from here on."""
    if cpu.uses_cpu():
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the most memory that this process, or its GPU's tensors, have had, in GiB."""
    if not cpu.uses_cpu():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def machine() -> dict:
    packages = ("torch", "transformers", "deepspeed", "openrlhf")
    processor = platform.processor() or platform.machine()
    if cpu.uses_cpu():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
        processor += f", {os.cpu_count()} cores"
    else:
        processor = torch.cuda.get_device_name()
    has_bf16 = not cpu.uses_cpu() or cpu.multiplies_bf16()
    products = str(type_of_products()).removeprefix("torch.")
    facts = dict(processor=processor, bf16_instructions=has_bf16, products=products, python=platform.python_version())
    return facts | {name: importlib.metadata.version(name) for name in packages}
