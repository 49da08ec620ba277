"""Locks the packages anew: `python requirements/lock.py [--upgrade-package NAME]`

uv resolves setup.py and wishes.in into lock.txt, and keeps the versions there. Arguments go to `uv pip compile`.
Then each lock gets the hashes of all wheels for Linux on x86-64 and the Pythons of `make setup`, or of a package's
sources if it has no such wheel. A lock for one Python names it: `# Python 3.12`.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
COMPILE = ("uv", "pip", "compile", "--quiet", "--system-certs")


def resolve(arguments: list[str]) -> None:
    """Write lock.txt without hashes, for all platforms and Pythons."""
    options = ["--universal", "--python-version", PYTHONS[0], "--excludes", HERE / "excludes.txt", "--no-annotate"]
    options += ["--custom-compile-command", "python requirements/lock.py", "--output-file", HERE / "lock.txt"]
    wishes = [HERE.parent / "setup.py", "--all-extras", HERE / "wishes.in"]
    subprocess.run([*COMPILE, *options, *wishes, *arguments], check=True)


def hashes(pins: list[str], python: str) -> dict[str, set[str]]:
    """Return the hashes of each package that a Python needs."""
    options = f"--no-deps --format pylock.toml --python-platform x86_64-manylinux_2_40 --python-version {python} -"
    # OpenRLHF has no wheel for 3.13. Its wheels are pure Python, and `make setup` always takes the one for 3.12.
    given = "\n".join(pin for pin in pins if python == "3.12" or not pin.startswith("openrlhf=="))
    found = subprocess.run([*COMPILE, *options.split()], input=given, stdout=subprocess.PIPE, text=True, check=True)
    return {
        package["name"]: {file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]}
        for package in tomllib.loads(found.stdout)["packages"]
    }


def hashed(text: str) -> str:
    """Return a lock with new hashes, and without packages that only other platforms need."""
    named = re.search(r"^# Python (\S+)", text, re.M)
    pins = [line.split(" --hash")[0] for line in text.splitlines()]
    found = [hashes(pins, python) for python in ([named[1]] if named else PYTHONS)]
    lines = []
    for pin in pins:
        if pin.startswith("#"):
            lines.append(pin)
            continue
        name = re.sub("[-_.]+", "-", pin.partition("==")[0]).lower()
        # The marker stays if only some Pythons need the package.
        pin = pin.partition(" ;")[0] if all(name in each for each in found) else pin
        if every := sorted({sha256 for each in found for sha256 in each.get(name, ())}):
            lines.append(" ".join([pin, *(f"--hash=sha256:{sha256}" for sha256 in every)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    resolve(sys.argv[1:])
    for name in ("lock.txt", "docs.txt", "gpu.txt", "flash_attn.txt"):
        path = HERE / name
        path.write_text(hashed(path.read_text("utf-8")), "utf-8")
