"""`make setup` says in one line what the machine lacks, and keeps the old .venv until it can build a new one.

A workflow calls a target that is there.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arlopti_openrlhf import __version__

ROOT = Path(__file__).parents[1]
PYTHON = "needs Python 3.11, 3.12 or 3.13 with its venv module, as in python3-venv, and found"
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
        (
            "python3.11",
            "exit 1",
            f"{PYTHON} none",
        ),
        (
            "python3.11",
            '[[ "$2" != *venv* ]]',
            f"{PYTHON} python3.11 without it",
        ),
        ("python3.11", '[[ "$2" == *include* ]] && echo /nowhere || exit 0', "needs Python's headers, as in the pack"),
        ("c++", None, "needs a C++ compiler (g++)"),
        (
            "python3.11",
            f'[[ "$2" != *libnuma* ]] && exec {sys.executable} "$@"; exit 1',
            "needs libnuma.so.1, as in the package libnuma1",
        ),
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


def workflow(name: str) -> tuple[dict, dict]:
    """Return what starts a workflow, and its jobs."""
    content = yaml.load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8"), yaml.BaseLoader)
    return content["on"], content["jobs"]


def schedule(starts: dict) -> list[str]:
    [schedule] = starts["schedule"]
    return schedule["cron"].split()


def commands(jobs: dict) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_the_weekly_workflow_calls_targets():
    starts, jobs = workflow("upstream")
    minute, hour, *days, weekday = schedule(starts)
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*"] and weekday in "0123456"
    lock = "pip install uv && python requirements/lock.py --upgrade"
    assert commands(jobs) == [
        "make upstream",
        f"{lock} && make test",
        f"{lock} --override requirements/newest.txt",
        "make quickstart ARGS=--reduced",
        "make test ARGS=tests/contract",
        "make test PYTHON=python${{ matrix.python }}",
    ]
    assert jobs["newest"]["continue-on-error"] == "true" and "continue-on-error" not in jobs["today"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "\nupstream: setup\n" in makefile and "\ntest: setup\n" in makefile
    assert jobs["pythons"]["strategy"]["matrix"]["python"] == ["3.12", "3.13"]  # the nightly one has 3.11


def test_a_tag_publishes_after_a_check_that_cannot():
    starts, jobs = workflow("release")
    assert starts == {"push": {"tags": ["v*"]}}
    [checked, check], [tool, publish] = (commands({name: jobs[name]}) for name in ("check", "publish"))
    assert check == "make dist PYTHON=python3.12" and "\ndist: setup\n" in (ROOT / "Makefile").read_text("utf-8")
    assert jobs["publish"]["needs"] == "check" and "permissions" not in jobs["check"]
    assert "uv==" in tool and "--require-hashes" in tool and " && uv publish " in publish
    for file, line in (
        ("arlopti_openrlhf/__init__.py", f'__version__ = "{__version__}"'),
        ("CHANGELOG.md", f"## [{__version__}] - "),
    ):
        pattern = line.replace(__version__, "${GITHUB_REF_NAME#v}").replace('"', '\\"')
        assert f'grep -F "{pattern}" {file}' in checked and line in (ROOT / file).read_text("utf-8")


def test_the_nightly_workflow_calls_each_long_suite():
    starts, jobs = workflow("nightly")
    minute, hour, *days = schedule(starts)
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*", "*"]
    # Ubuntu lets nobody else make the namespace in which chaos mounts a small disk.
    allow = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    assert commands(jobs) == [allow, "make ${{ matrix.target }}"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = jobs["suite"]["strategy"]["matrix"]["target"]
    assert targets == ["lint", "test", "long", "modes", "chaos"] and all(
        f"\n{target}: setup\n" in makefile for target in targets
    )
