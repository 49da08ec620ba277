"""Writes the hashes of a lock anew, after a change of its versions: `python requirements/hashes.py FILE...`

uv looks each version up and installs nothing. A package gets the hashes of its wheels for Linux on x86-64 and Python
3.11, or that of its sources if it has no such wheel. A line may name another version of Python: `# Python 3.12`.
"""

import re
import subprocess
import sys
from pathlib import Path

import tomllib

_UV = "uv pip compile --quiet --system-certs --no-deps --format pylock.toml --python-platform x86_64-manylinux_2_40"


def lines(text: str) -> list[str]:
    """Return the lines of a lock with new hashes."""
    python = re.search(r"^# Python (\S+)", text, re.M)
    command = [*_UV.split(), "--python-version", python[1] if python else "3.11", "-"]
    pins = [line.split(" --hash")[0] for line in text.splitlines()]
    found = subprocess.run(command, input="\n".join(pins), stdout=subprocess.PIPE, text=True, check=True).stdout
    hashes = {}
    for package in tomllib.loads(found)["packages"]:
        files = package.get("wheels") or [package["sdist"]]
        hashes[package["name"]] = sorted({file["hashes"]["sha256"] for file in files})
    names = [re.match(r"([\w.-]*)==", pin) for pin in pins]
    normal = [name and re.sub("[-_.]+", "-", name[1]).lower() for name in names]
    return [
        " ".join([pin, *(f"--hash=sha256:{each}" for each in hashes[name])]) if name else pin
        for pin, name in zip(pins, normal, strict=True)
    ]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text("\n".join(lines(path.read_text("utf-8"))) + "\n", "utf-8")
