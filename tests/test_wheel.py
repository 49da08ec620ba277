"""The sdist and the wheel hold what they should. Beside the stack, the wheel trains in a folder that has our names."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from arlopti_openrlhf.cli.main import COMMANDS

pytestmark = pytest.mark.whole_stack

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Return the folder with the sdist and the wheel: what `make dist` has built, or one built from a copy.

    From a copy, because a build leaves its folders behind.
    """
    if "ARLOPTI_DIST" in os.environ:
        return Path(os.environ["ARLOPTI_DIST"])
    source, out = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("dist")
    ignored = [".*", "__pycache__", *(ROOT / ".gitignore").read_text("utf-8").replace("/", "").split()]
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    build = ["uv", "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    [wheel] = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> str:
    """Return the interpreter of a virtual environment that has the wheel, and behind it on the path, our stack.

    Python only searches a folder that a .pth file names. The .pth files in there, such as our editable install's, do
    nothing. DeepSpeed needs that of setuptools, with which Python 3.12 still has distutils.
    """
    folder = tmp_path_factory.mktemp("environment")
    python = install(wheel, folder)
    site = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    stack = Path(sysconfig.get_path("purelib"))
    lines = f"{stack}\n{(stack / 'distutils-precedence.pth').read_text('utf-8')}\n"
    Path(site, "stack.pth").write_text(lines, encoding="utf-8")
    return python


def install(wheel: Path, folder: Path) -> str:
    """Make a virtual environment that has the wheel and nothing else, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture
def folder(tmp_path) -> Path:
    """Make a working directory with a package `rewards` of the user's own."""
    rewards = tmp_path / "work" / "rewards"
    rewards.mkdir(parents=True)
    (rewards / "__init__.py").touch()
    (rewards / "kk_reward.py").write_text("USEFUL = False\n", encoding="utf-8")
    return tmp_path / "work"


def run(command: list[str], folder: Path, timeout: float) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for name in ("ARLOPTI_ANNOUNCED", "ARLOPTI_ENABLED", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, errors="replace"
    )


ASK = """
import importlib.metadata
import arlopti_openrlhf, rewards.kk_reward
print(arlopti_openrlhf.__file__)
[plugin] = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "arlopti_cpu"]
print(plugin.dist.locate_file("arlopti_openrlhf/__init__.py"))
print(plugin.load().__qualname__)
print([name.name for name in plugin.dist.files if name.parts[0] == ".."])
print(sorted({name.parts[0] for name in plugin.dist.files if not name.parts[0].endswith((".dist-info", ".."))}))
print(plugin.dist.locate_file("arlopti_openrlhf/py.typed").is_file())
print(hasattr(rewards.kk_reward, "USEFUL"))
"""


def test_the_wheel_holds_one_package_and_the_vllm_plugin(python, folder):
    done = run([python, "-c", ASK], folder, 120)
    site = Path(python).parents[1] / "lib"
    imported, described, plugin, commands, packages, is_typed, has_own_rewards = done.stdout.splitlines()[-7:]
    assert imported == described and Path(imported).is_relative_to(site), done.stderr
    assert (plugin, commands, packages) == ("enable_in_vllm", "['arlopti']", "['arlopti_openrlhf']")
    assert is_typed == has_own_rewards == "True"
    done = run([str(Path(python).with_name("arlopti")), "--version"], folder, 120)
    assert done.returncode == 0 and done.stdout.startswith("arlopti_openrlhf "), done.stderr


def test_without_openrlhf_each_command_says_so_in_one_line(wheel, folder, tmp_path):
    """The environment has not even what the wheel requires."""
    arlopti = Path(install(wheel, tmp_path / "environment")).with_name("arlopti")
    for word in COMMANDS:
        done = run([str(arlopti), word, "--help"], folder, 60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "arlopti: error: OpenRLHF is not installed; pip install openrlhf==0.11.2\n", done.stderr
    done = run([str(arlopti), "--version"], folder, 60)
    assert done.returncode == 0 and "openrlhf is not installed" in done.stdout, done.stderr


def needs(requirements: list[str], extra: str) -> set[str]:
    """Return the names of all distributions that pip would want, as far as they are installed here."""
    names: set[str] = set()
    open_requirements = [(Requirement(text), extra) for text in requirements]
    while open_requirements:
        requirement, of_extra = open_requirements.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        if requirement.name not in names:
            names.add(requirement.name)
            with suppress(importlib.metadata.PackageNotFoundError):
                inner = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
                open_requirements += [(r, e) for r in inner for e in (requirement.extras or {""})]
    return names


def test_only_the_gpu_extra_asks_for_flash_attn(wheel):
    """pip cannot build flash-attn in a fresh environment, nor in the CPU stack's."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    assert {"math-verify", "fastapi"} <= needs(requirements, "")
    assert "openrlhf" not in needs(requirements, "") and "flash-attn" not in needs(requirements, "analyze")
    assert "matplotlib" in needs(requirements, "analyze")
    assert {"openrlhf", "flash-attn", "vllm"} <= needs(requirements, "gpu")


@pytest.mark.long
def test_two_steps_with_the_packages_reward_beside_a_rewards_folder(python, folder, tiny_model, tiny_data):
    command = f"""
        {python} -m arlopti_openrlhf.cli.train_ppo_ray --reward.remote_url kk
        --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
        --algo.ar.alpha 0.3
        --actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples 8
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
        --rollout.max_new_tokens 16 --rollout.batch_size 4 --rollout.n_samples_per_prompt 2
        --rollout.micro_batch_size 4 --train.batch_size 8 --train.micro_batch_size 4
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --train.colocate_all
        --vllm.enforce_eager --vllm.sync_backend gloo --ckpt.output_dir {folder}/final --ckpt.path {folder}/ckpt
    """
    done = run(command.split(), folder, 600)
    log = done.stdout + done.stderr
    assert done.returncode == 0 and (folder / "final" / "model.safetensors").exists(), log[-6000:]
    assert re.findall(r"Global step (\d+): \{", log) == ["1", "2"]
    # OpenRLHF's engine says which file it loads.
    [reward] = set(re.findall(r"from (\S+/kk_reward\.py)", log))
    assert Path(reward).is_relative_to(Path(python).parents[1]) and Path(reward).parent.name == "grading"
