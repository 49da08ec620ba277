"""OpenRLHF without a GPU, and on a GPU without flash-attn. The entry point is `enable()`.

OpenRLHF names CUDA in a handful of places. `enable()` redirects those (`arlopti_openrlhf.cpu.patches`) and leaves its
files untouched. It has to run in every process before OpenRLHF is used there. The command line calls it in the
driver, Ray in each worker (`worker_process_setup_hook`), and vLLM in its engine process, by `enable_in_vllm`.
The precedent is Ascend's `torch_npu.contrib.transfer_to_npu`.

Each process decides for itself, by the hardware of its own machine. A decision of the driver would not do, because
the driver of a GPU cluster often runs on a head node without a GPU. ARLOPTI_DEVICE overrides the hardware everywhere.
"""

import functools
import json
import os
import shutil
import sys

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cpu import patches
from arlopti_openrlhf.hardware import has_flash_attn, multiplies_bf16, uses_cpu
from arlopti_openrlhf.ray_address import starts_cluster

_HOOK = "arlopti_openrlhf.cpu.enable"
_ENABLED = "ARLOPTI_ENABLED"  # this process, or one that has started it, has called `enable`
_ANNOUNCED = "ARLOPTI_ANNOUNCED"  # the user knows what the run computes on
_LOGICAL_GPUS = "ARLOPTI_LOGICAL_GPUS"  # how many a cluster that starts here declares
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: vLLM would take most of the memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's worker would be a process that imports everything once more
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for PyTorch: page faults of fresh tensors were a fifth of an update
    "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions"),  # for `_find_ninja`
}


def enable(driver: bool = False) -> None:
    """Let OpenRLHF run in this process without CUDA, or without flash-attn; do nothing where it has both.

    Idempotent. Makes `ray.init` call it in every worker of the job too.

    Args:
        driver: this process computes nothing itself. `ray.init` then says what the run computes on, or the workers do
            where it joins a cluster.

    Raises:
        SystemExit: ARLOPTI_DEVICE is neither `cpu` nor `cuda`.
    """
    _find_ninja()
    on_cpu, without_flash_attn = uses_cpu(), not has_flash_attn()
    if not (on_cpu or without_flash_attn) or patches.are_made():
        return
    os.environ[_ENABLED] = "1"
    # Before the defaults below: the workers may run on other machines, and get only what the user has set.
    settings = {name: os.environ[name] for name in ("ARLOPTI_DEVICE", "VLLM_CPU_KVCACHE_SPACE") if name in os.environ}
    if on_cpu:
        message = "ARLOPTI_DEVICE=cpu" if os.environ.get("ARLOPTI_DEVICE") else "no CUDA device on this machine"
        message += ": OpenRLHF runs on the CPU"
        os.environ["DS_ACCELERATOR"] = "cpu"
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
    else:
        message = "flash-attn is not installed: attention runs on PyTorch's SDPA"
    if not driver:
        _announce(message)
    patches.make(without_cuda=on_cpu, without_flash_attn=without_flash_attn, without_bf16=not multiplies_bf16())
    _hook_ray_workers(on_cpu, message, settings)


def enable_in_vllm() -> None:
    """Call `enable` if a process that has called it started this one. vLLM loads this as a plugin (`setup.py`).

    It does so in every process of every project in the environment. There is no other way into its engine process.
    """
    if _ENABLED in os.environ:
        enable()


def declare_placement(gpus: int, ranks: int) -> None:
    """Declare what the run will ask of this machine. Only a `ray.init` that starts a cluster on the CPU uses it.

    Args:
        gpus: logical GPUs to declare, for OpenRLHF's placement groups.
        ranks: training processes that compute at the same time; they share the cores.
    """
    os.environ[_LOGICAL_GPUS] = str(gpus)
    if uses_cpu():
        # Ray would give each worker one thread: its actors reserve a fraction of a logical CPU.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def _announce(message: str) -> None:
    # The variable reaches the workers with the rest of the environment, so only the first process says the line.
    if not os.environ.get(_ANNOUNCED):
        terminal.say(f"{message}.")
        os.environ[_ANNOUNCED] = "1"


def _find_ninja() -> None:
    """Let DeepSpeed compile its ops with this environment's own ninja, activated or not.

    Ninja compiles everything again where another version of it left the build folder, so all runs must use one.
    """
    tools, path = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    if shutil.which("ninja", path=tools) and path.split(os.pathsep)[0] != tools:
        os.environ["PATH"] = tools + os.pathsep + path


def _hook_ray_workers(on_cpu: bool, message: str, settings: dict[str, str]) -> None:
    """Wrap `ray.init`: every worker of the job calls `enable()`, and a cluster that it starts gets logical GPUs.

    Args:
        on_cpu: this machine computes without CUDA.
        message: what to say when a cluster is started here.
        settings: environment variables that the user has set, for the workers.
    """
    import ray
    from ray._private.utils import read_ray_address

    init = ray.init

    @functools.wraps(init)
    def init_with_hook(*args, **kwargs):
        # Any program may call `enable`, and join what `ray start` has started here.
        started_here = read_ray_address(kwargs.get("_temp_dir"))
        starts = starts_cluster(args[0] if args else kwargs.get("address"), started_here)
        if starts:
            _announce(message)
        variables = settings | {_ANNOUNCED: os.environ.get(_ANNOUNCED, "")}
        # `ray job submit` has handed the job's own variables on already, and refuses those given twice.
        variables = {name: value for name, value in variables.items() if value and name not in _job_variables()}
        runtime_env = {"worker_process_setup_hook": _HOOK} | (kwargs.get("runtime_env") or {})
        kwargs["runtime_env"] = runtime_env | {"env_vars": variables | runtime_env.get("env_vars", {})}
        if on_cpu and starts:
            # With its GPUs hidden, Ray declares no logical ones. The workers stay on the CPU all the same.
            if os.environ.pop("CUDA_VISIBLE_DEVICES", None) is not None and "ARLOPTI_DEVICE" not in os.environ:
                kwargs["runtime_env"]["env_vars"]["ARLOPTI_DEVICE"] = "cpu"
            gpus = int(os.environ.get(_LOGICAL_GPUS, "8"))
            # Each logical GPU's bundle asks for a CPU too, and each controller (up to four in async mode) for one.
            kwargs = {"num_gpus": gpus, "num_cpus": max(os.cpu_count() or 1, gpus + 4)} | kwargs
            kwargs.setdefault("include_dashboard", False)  # its processes would take a core and half a gigabyte
        return init(*args, **kwargs)

    ray.init = init_with_hook


def _job_variables() -> dict[str, str]:
    """Return the environment variables of the job as which `ray job submit` started this process."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return (job.get("runtime_env") or {}).get("env_vars") or {}
