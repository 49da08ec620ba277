"""Compares what a run certainly keeps in memory with what this machine has. Activations come on top."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.finding import Finding, in_words
from arlopti_openrlhf.ops.preflight.model import model_size
from arlopti_openrlhf.ops.preflight.placement import gpus_of
from arlopti_openrlhf.ops.preflight.values import loads_reference
from arlopti_openrlhf.ray_address import starts_cluster


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Warn if what a rank keeps is more than its GPU has. Without a GPU, all ranks share the machine's memory."""
    from arlopti_openrlhf import cpu  # imports PyTorch

    size = model_size(args.actor.model_name_or_path)
    if size is None or not starts_cluster():
        return
    kept, total, where = states(args, size.parameters), gpu_memory(), "the smallest GPU"
    if cpu.uses_cpu():
        kept *= gpus_of(args, "actor")
        total, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    if total and kept > total:
        problem = f"weights, gradients and optimizer take {in_words(kept)}, and {where} has {in_words(total)}"
        remedy = "more ranks, --ds.zero_stage 3 and --ds.adam_offload lower it on GPUs, and a smaller model anywhere"
        yield Finding.of(args, "actor.model_name_or_path", problem, remedy, is_fatal=False)


def gpu_memory() -> int | None:
    """Return the memory in bytes of the smallest GPU that NVIDIA's driver shows. None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return min(int(line) for line in done.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def states(args: SimpleNamespace, parameters: int) -> float:
    """Return the bytes on one rank of weights, gradients and optimizer, by the stage of ZeRO (arXiv 1910.02054).

    A reference model that shares the rank's GPU counts too, unless DeepSpeed offloads it.
    """
    stage, split = args.ds.zero_stage, args.ds.tensor_parallel_size
    shards = max(1, gpus_of(args, "actor") // split)
    trained = 0 if args.ds.lora.rank else parameters / split  # an adapter is small
    weights = (0.55 if args.ds.load_in_4bit else 2) * parameters / split / (shards if stage == 3 else 1)
    gradients = 2 * trained / (shards if stage >= 2 else 1)
    optimizer = 0 if args.ds.adam_offload else 12 * trained / (shards if stage >= 1 else 1)
    is_here = loads_reference(args) and (args.train.colocate_all or args.train.colocate_actor_ref)
    is_offloaded = args.ref.offload and stage == 3
    return weights + gradients + optimizer + (weights if is_here and not is_offloaded else 0)
