"""`make setup` says in one line what the machine lacks, and keeps the old .venv until it can build a new one.

A workflow calls a target that is there.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "make", "cat", "cut", "sha256sum", "uname", "rm", "touch", "tail", "grep")


@pytest.fixture
def machine(tmp_path) -> Path:
    """Make a clone whose .venv is of another lock, and `bin`, which has all that the machine has."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "torch.txt").write_text("torch==0\n")
    (tmp_path / "requirements" / "lock.txt").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    script(tmp_path, "python3.11", f'exec {sys.executable} "$@"')
    script(tmp_path, "c++", "exit 0")
    return tmp_path


def script(machine: Path, name: str, body: str) -> None:
    path = machine / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def setup(machine: Path) -> str:
    """Return what `make setup` says on standard error, without make's own last line."""
    command = [str(machine / "bin" / "make"), "-C", str(machine), "setup"]
    done = subprocess.run(command, env={"PATH": str(machine / "bin")}, capture_output=True, text=True)
    assert done.returncode == 2
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("make: ***"))


@pytest.mark.parametrize(
    ("tool", "body", "message"),
    [
        (
            "uname",
            "echo Linux aarch64",
            "needs Linux on x86-64, for which requirements/lock.txt has wheels, and this is ",
        ),
        ("python3.11", "exit 1", "needs Python 3.11 with its venv module"),
        ("python3.11", '[[ "$2" == *include* ]] && echo /nowhere || exit 0', "needs Python's headers, as in the pack"),
        ("c++", None, "needs a C++ compiler (g++)"),
    ],
)
def test_what_is_missing_is_said_before_the_old_environment_goes(machine, tool, body, message):
    if body is None:
        (machine / "bin" / tool).unlink()
    else:
        script(machine, tool, body)
    line = setup(machine)
    assert line.startswith(f"make setup: {message}") and "\n" not in line
    assert (machine / ".venv").exists()


def test_the_old_environments_python_does_not_build_the_new_one(machine):
    (machine / ".venv" / "bin").mkdir()
    (machine / ".venv" / "bin" / "python3.11").symlink_to(sys.executable)
    script(machine, "python3.11", "exit 1")
    assert setup(machine).startswith("make setup: needs Python 3.11") and (machine / ".venv").exists()


def test_a_path_with_a_space_is_refused_before_anything_is_downloaded(machine):
    """PyTorch's build gives the linker its paths without quotes."""
    clone = machine / "with space"
    clone.mkdir()
    for name in ("Makefile", "requirements", ".venv", "bin"):
        (machine / name).rename(clone / name)
    line = setup(clone)
    assert line.startswith(f"make setup: {clone} has a space in its path") and "\n" not in line
    assert (clone / ".venv").exists()


def test_nothing_is_missing(machine):
    """It then goes on, and here fails when it makes the new environment."""
    script(machine, "python3.11", f'[[ "$1" == -m ]] && exit 7; exec {sys.executable} "$@"')
    assert "needs" not in setup(machine) and not (machine / ".venv").exists()


def workflow(name: str) -> tuple[list[str], dict]:
    """Return the five fields of a workflow's schedule, and its jobs."""
    content = yaml.load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8"), yaml.BaseLoader)
    [schedule] = content["on"]["schedule"]
    return schedule["cron"].split(), content["jobs"]


def commands(jobs: dict) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_the_weekly_workflow_calls_targets():
    (minute, hour, *days, weekday), jobs = workflow("upstream")
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*"] and weekday in "0123456"
    assert commands(jobs) == ["make upstream", "make pythons PYTHONS=${{ matrix.python }}"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "\nupstream: setup\n" in makefile and "\npythons:\n" in makefile
    pythons = jobs["pythons"]["strategy"]["matrix"]["python"]
    assert f"\nPYTHONS ?= {' '.join(pythons)}\n" in makefile


def test_the_nightly_workflow_calls_each_long_suite():
    (minute, hour, *days), jobs = workflow("nightly")
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*", "*"]
    assert commands(jobs) == ["make ${{ matrix.target }}"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = jobs["suite"]["strategy"]["matrix"]["target"]
    assert targets == ["long", "modes", "chaos"] and all(f"\n{target}: setup\n" in makefile for target in targets)
