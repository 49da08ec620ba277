"""What this machine has to compute with."""

import functools
import importlib.util
import os

import torch

from arlopti_openrlhf import terminal


def multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 instructions. PyTorch emulates them, several times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_flash_attn() -> bool:
    """Return whether flash-attn is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def uses_cpu() -> bool:
    """Return whether OpenRLHF runs on the CPU in this process. CUDA stays uninitialised if NVML is there.

    ARLOPTI_DEVICE decides where it is set, to `cpu` or `cuda`. Otherwise a machine without a CUDA device uses the CPU.

    Raises:
        SystemExit: ARLOPTI_DEVICE has another value.
    """
    # Without it PyTorch counts devices by initialising the driver. A process forked afterwards cannot use CUDA, and
    # the CUDA_VISIBLE_DEVICES that Ray sets later is not read any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    device = os.environ.get("ARLOPTI_DEVICE")
    if device and device not in ("cpu", "cuda"):
        raise SystemExit(f"{terminal.PREFIX}ARLOPTI_DEVICE={device}: must be cpu or cuda, or unset")
    return device == "cpu" if device else not _sees_gpu()


@functools.cache
def _sees_gpu() -> bool:
    """Return whether this machine shows the process a GPU.

    Asked once, because Ray hides the GPUs from a worker that was given none, after the worker's hook has run. What
    counts is the machine.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return torch.backends.cuda.is_built()  # PyTorch does not look MIG instances up in NVML, but asks CUDA
    return torch.cuda.is_available()
