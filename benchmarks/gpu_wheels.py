"""Gathers what `gpu_check.py` needs and a machine with torch, transformers, accelerate and peft may lack.

python benchmarks/gpu_wheels.py FOLDER [--python 3.12]

The versions are those of requirements/lock.txt and gpu.txt. Run it where pip reaches an index, carry FOLDER to the
machine with the GPU, and install there with the command that it prints. Neither step looks for dependencies, so what
is installed there stays as it is.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

GIVEN = ("torch", "transformers", "accelerate", "peft")
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
LOCK = REQUIREMENTS / "lock.txt"
# By distribution, the package that is imported. What follows openrlhf and deepspeed is what these import.
PACKAGES = {
    "openrlhf": "openrlhf",
    "deepspeed": "deepspeed",
    "annotated-types": "annotated_types",
    "einops": "einops",
    "hjson": "hjson",
    "msgpack": "msgpack",
    "ninja": "ninja",
    "pillow": "PIL",
    "py-cpuinfo": "cpuinfo",
    "pydantic": "pydantic",
    "pydantic-core": "pydantic_core",
    "pylatexenc": "pylatexenc",
    "torchdata": "torchdata",
    "typing-inspection": "typing_inspection",
}
ON_A_GPU = {"liger-kernel": "liger_kernel"}  # its kernels need Triton, which comes with PyTorch's builds for CUDA
FROM_SOURCE = ("deepspeed", "pylatexenc", "transformers-stream-generator")  # published without a wheel
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU, which runs Linux on x86-64")
    args = parser.parse_args()
    versions = pinned()
    fetch([f"{name}=={versions[name]}" for name in PACKAGES | ON_A_GPU], args.folder, args.python)
    files = sorted(args.folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 1e6:8.2f} MB  in all")
    print(f"on the machine:  python -m pip install --no-index --no-deps {args.folder}/*.whl")


def fetch(packages: Iterable[str], folder: Path, python: str) -> None:
    """Download the wheels of packages, as in "ray==2.55.0", for another Python. Those without a wheel are built."""
    named = {package.partition("==")[0]: package for package in packages}
    source = [package for name, package in named.items() if name in FROM_SOURCE]
    # Built without torch in sight, DeepSpeed is pure Python, and compiles what it needs where it runs. The lock's
    # hashes are left out, because with them pip asks for one of each package.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in pinned().items()))
        constraints.flush()
        building = os.environ | {"PIP_CONSTRAINT": constraints.name}
        if source:
            command = [*_PIP, "wheel", "--no-deps", "--use-pep517", "-w", folder, *source]
            subprocess.run(command, check=True, env=building)
    wheels = [package for name, package in named.items() if name not in FROM_SOURCE]
    subprocess.run([*_PIP, "download", "--no-deps", *tags(python), "-d", folder, *wheels], check=True)


def tags(python: str) -> list[str]:
    """Return pip's flags for wheels of another Python on Linux and x86-64. pip compares each tag exactly."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    return ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]


def pinned() -> dict[str, str]:
    """Return the versions of requirements/lock.txt by distribution, and of gpu.txt what only a GPU needs."""
    texts = ((REQUIREMENTS / name).read_text(encoding="utf-8") for name in ("gpu.txt", "lock.txt"))
    return dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(texts), re.MULTILINE))


if __name__ == "__main__":
    main()
