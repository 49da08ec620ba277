"""Where OpenRLHF runs: how each process decides, what the driver tells Ray, and that nobody initialises CUDA early."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import ray
import torch

from arlopti_openrlhf import cpu, hardware
from arlopti_openrlhf.cpu import patches as cpu_patches

pytestmark = pytest.mark.whole_stack

# A machine with two GPUs as NVML shows it, and a record of everything that would initialise CUDA.
TWO_GPUS = """
import torch
torch.initialised = []
torch._C._cuda_getDeviceCount = lambda: torch.initialised.append("_cuda_getDeviceCount") or 2
torch._C._cuda_getCurrentRawStream = None  # what a build with CUDA has
torch._C._cuda_init = lambda: torch.initialised.append("_cuda_init")
torch.cuda._lazy_init = lambda: torch.initialised.append("_lazy_init")
torch.cuda._raw_device_count_nvml = lambda: 2
"""


def environment(**more: str) -> dict[str, str]:
    """The tests' environment without what `enable()` has put there, or a user might have."""
    ours = ("ARLOPTI", "DS_ACC", "VLLM_CPU", "CUDA_VIS", "PYTORCH_NVML", "RAY_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**variables), capture_output=True, text=True, timeout=400
    )


# --- this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, variables, on_cpu",
    [
        (0, {}, True),
        (0, {"ARLOPTI_DEVICE": "cuda"}, False),
        (2, {}, False),
        (2, {"ARLOPTI_DEVICE": ""}, False),
        (2, {"ARLOPTI_DEVICE": "cpu"}, True),
        (2, {"CUDA_VISIBLE_DEVICES": ""}, True),
        (2, {"CUDA_VISIBLE_DEVICES": "1"}, False),
        (2, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, False),
    ],
)
def test_the_variable_overrides_the_hardware_both_ways(monkeypatch, gpus, variables, on_cpu):
    for name in ("ARLOPTI_DEVICE", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    initialised = []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: initialised.append(1) or gpus, raising=False)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: gpus)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    hardware._sees_gpu.cache_clear()
    try:
        assert cpu.uses_cpu() is on_cpu
    finally:
        hardware._sees_gpu.cache_clear()
    assert not initialised


@pytest.mark.parametrize("device", ["", "cpu"])
def test_the_choice_is_not_written_where_children_would_inherit_it(device):
    code = f"""
import os
{TWO_GPUS}
current_device = torch.cuda.current_device
from arlopti_openrlhf import cpu
cpu.enable()
assert (torch.cuda.current_device is current_device) is {not device}
assert os.environ.get("DS_ACCELERATOR") == {device or None!r}
assert os.environ["ARLOPTI_DEVICE"] == {device!r}
assert not torch.initialised, torch.initialised
"""
    result = python(code, ARLOPTI_DEVICE=device)
    assert result.returncode == 0, result.stderr


def test_another_value_of_the_variable_is_refused_in_one_line():
    result = python("from arlopti_openrlhf import cpu; cpu.enable()", ARLOPTI_DEVICE="gpu")
    assert result.returncode == 1
    assert result.stderr == "arlopti_openrlhf: ARLOPTI_DEVICE=gpu: must be cpu or cuda, or unset\n"


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.long)])
def test_vllm_is_patched_only_where_a_run_of_ours_has_started_it(is_ours):
    """vLLM calls the plugin in every process of every project. Its engine process inherits the environment."""
    child = "from arlopti_openrlhf import cpu; cpu.enable_in_vllm(); print(cpu.patches.are_made())"
    result = python(f"""
import subprocess, sys
from arlopti_openrlhf import cpu
{is_ours} and (cpu.enable(), cpu.enable())
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)
""")
    assert result.stdout.split()[-1] == str(is_ours), result.stderr
    said = "arlopti_openrlhf: no CUDA device on this machine: OpenRLHF runs on the CPU.\n"
    assert result.stdout.count(said) == is_ours  # once, however often it is called


# --- before vLLM and Ray --------------------------------------------------------------------------------------------

STUB_VLLM = """
import sys, types
class LLM:
    def __init__(self, model, **settings):
        assert not torch.initialised, torch.initialised
        assert settings["dtype"] == "auto" and not settings["enforce_eager"], settings
        print("vLLM starts")
        sys.exit(0)
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm"].LLM = LLM
"""


@pytest.mark.long
@pytest.mark.parametrize("command", ["evaluate", "analyze"])
def test_no_command_initialises_cuda_before_vllm_starts(command, tiny_model, tiny_data, tmp_path):
    """vLLM forks its engine: "Cannot re-initialize CUDA in forked subprocess"."""
    code = f"""
{TWO_GPUS}
{STUB_VLLM}
from arlopti_openrlhf.lab.analysis import rollouts
from arlopti_openrlhf.cli import {command}
class Pool:  # the sampling process, in this one, where the GPUs are pretended
    __init__ = lambda self, *args, **kwargs: None
    __enter__ = lambda self: self
    __exit__ = lambda self, *args: None
    submit = lambda self, function, *args: function(*args)
rollouts.ProcessPoolExecutor = Pool
sys.argv = ["{command}", "--model", "{tiny_model}", "--data", "{tiny_data}", "--out", "{tmp_path}"]
{command}.main()
"""
    result = python(code)
    assert result.stdout.splitlines()[-1:] == ["vLLM starts"], result.stderr[-3000:]


CLUSTER = """
import sys
import ray
ray.init(num_gpus=2, num_cpus=4, include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
DRIVER = """
import os, json
from arlopti_openrlhf import cpu
cpu.enable(driver=True)
assert cpu.uses_cpu()
import ray
ray.init("{address}", runtime_env={{"env_vars": {{"PYTHONPATH": "{path}"}}}}, log_to_driver=False)

@ray.remote
class Worker:
    def report(self):
        import torch
        return dict(
            on_cpu=cpu.uses_cpu(),
            redirected=torch.cuda.current_device.__module__ != "torch.cuda",
            hooked=any(type(finder).__name__ == "_PatchOnImport" for finder in __import__("sys").meta_path),
            initialised=getattr(torch, "initialised", None),
            visible=torch.cuda.device_count(),
            variables=sorted(name for name in os.environ if name.startswith(("ARLOPTI", "DS_ACC"))),
        )

print(json.dumps(ray.get([Worker.options(num_gpus=n).remote().report.remote() for n in (0, 1)])))
"""


@pytest.mark.long
def test_each_worker_decides_for_itself(tmp_path):
    """A driver without a GPU joins a cluster, of two GPUs or of logical ones, and its workers go by their own machine.

    Ray narrows CUDA_VISIBLE_DEVICES after the hook has run, which counts only while CUDA is uninitialised. A worker
    that was given no GPU sees none of them then, and yet the run is not on the CPU.
    """
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    reports = {}
    try:
        address = cluster.stdout.readline().strip()
        for machine, code in (("with GPUs", TWO_GPUS), ("without", "")):
            (tmp_path / machine).mkdir()
            (tmp_path / machine / "sitecustomize.py").write_text(code)  # what the workers' Python starts with
            path = os.pathsep.join([str(tmp_path / machine), os.environ.get("PYTHONPATH", "")])
            result = python(DRIVER.format(address=address, path=path))
            assert result.returncode == 0, result.stderr[-3000:]
            reports[machine] = json.loads(result.stdout.splitlines()[-1])
    finally:
        cluster.communicate(timeout=60)  # closes its input; a job that a shell put in the background ignores SIGINT
    variables = ["ARLOPTI_ANNOUNCED", "ARLOPTI_ENABLED"]
    # ARLOPTI_ANNOUNCED: each worker says itself what it found, here that flash-attn is missing.
    common = dict(on_cpu=False, redirected=False, hooked=True, initialised=[], variables=variables)
    assert reports["with GPUs"] == [common | dict(visible=0), common | dict(visible=1)]
    variables = [*variables, "DS_ACCELERATOR"]
    common = dict(on_cpu=True, redirected=True, hooked=True, initialised=None, variables=variables)
    assert reports["without"] == [common | dict(visible=0)] * 2


# --- what the driver tells Ray --------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch, capsys):
    """told(arguments, variables) → lines that a driver without a GPU prints, and what reaches `ray.init`."""
    monkeypatch.setattr(hardware, "_sees_gpu", lambda: False)
    monkeypatch.setattr(cpu_patches, "are_made", lambda: False)
    monkeypatch.setattr(cpu_patches, "make", lambda **kwargs: None)
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: kwargs)

    def tell(arguments: dict, variables: dict[str, str]) -> tuple[list[str], dict]:
        os.environ.update(variables)
        cpu.enable(driver=True)
        assert capsys.readouterr().out == ""
        cpu.declare_placement(gpus=3, ranks=1)
        keywords = ray.init(**arguments)
        return capsys.readouterr().out.splitlines(), keywords

    with mock.patch.dict(os.environ):  # which undoes what `enable` writes
        for name in ("ARLOPTI_ANNOUNCED", "ARLOPTI_DEVICE", "RAY_ADDRESS", *cpu._DEFAULTS):
            os.environ.pop(name, None)
        yield tell


HOOK = "arlopti_openrlhf.cpu.enable"


@pytest.mark.parametrize("arguments, variables", [({}, {}), ({"address": "local"}, {"RAY_ADDRESS": "192.0.2.1:6379"})])
def test_a_cluster_that_the_driver_starts_gets_logical_gpus(told, arguments, variables, tmp_path):
    lines, keywords = told(arguments, variables | {"RAY_TMPDIR": str(tmp_path)})
    assert lines == ["arlopti_openrlhf: no CUDA device on this machine: OpenRLHF runs on the CPU."]
    assert (keywords["num_gpus"], keywords["num_cpus"]) == (3, max(os.cpu_count(), 7))
    assert keywords["runtime_env"] == {"worker_process_setup_hook": HOOK, "env_vars": {"ARLOPTI_ANNOUNCED": "1"}}


@pytest.mark.parametrize(
    "arguments, variables",
    [
        ({}, {"RAY_ADDRESS": "192.0.2.1:6379"}),
        ({"address": "192.0.2.1:6379"}, {}),
        ({"address": "auto"}, {}),
        ({"address": "ray://192.0.2.1:10001"}, {}),
        ({}, {"RAY_TMPDIR": "FOLDER"}),  # where `ray start` leaves the address
    ],
)
def test_a_cluster_that_the_driver_joins_is_told_nothing_about_the_driver(told, arguments, variables, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("192.0.2.1:6379")
    lines, keywords = told(arguments, {name: v.replace("FOLDER", str(tmp_path)) for name, v in variables.items()})
    assert lines == []
    assert keywords == arguments | {"runtime_env": {"worker_process_setup_hook": HOOK, "env_vars": {}}}


@pytest.mark.parametrize("hidden", ["", "NoDevFiles"])
def test_hidden_gpus_stay_hidden_and_ray_declares_logical_ones(told, hidden, tmp_path):
    """Ray refuses to declare more GPUs than the variable names. Slurm writes NoDevFiles for a job without a GPU."""
    _, keywords = told({}, {"CUDA_VISIBLE_DEVICES": hidden, "RAY_TMPDIR": str(tmp_path)})
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and keywords["num_gpus"] == 3
    assert keywords["runtime_env"]["env_vars"]["ARLOPTI_DEVICE"] == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_user_has_set_reaches_the_workers_of_a_cluster(told, device):
    user = {"ARLOPTI_DEVICE": device, "VLLM_CPU_KVCACHE_SPACE": "7"}
    lines, keywords = told({}, user | {"RAY_ADDRESS": "192.0.2.1:6379"})
    assert lines == []
    assert keywords["runtime_env"]["env_vars"] == user
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if device == "cpu" else None)


def test_variables_of_a_submitted_job_are_not_given_twice(told):
    """`ray job submit` puts them in the driver's environment, and `ray.init` refuses a variable that both name."""
    from ray.runtime_env.runtime_env import _merge_runtime_env

    job = {"runtime_env": {"env_vars": {"ARLOPTI_DEVICE": "cuda"}}, "metadata": {}}
    variables = {"ARLOPTI_DEVICE": "cuda", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    keywords = told({"address": "192.0.2.1:6379"}, variables)[1]
    merged = _merge_runtime_env(job["runtime_env"], keywords["runtime_env"])
    assert merged == {"worker_process_setup_hook": HOOK, "env_vars": {"ARLOPTI_DEVICE": "cuda"}}
