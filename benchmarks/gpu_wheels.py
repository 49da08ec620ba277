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
FROM_SOURCE = ("deepspeed", "pylatexenc")  # published without a wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU, which runs Linux on x86-64")
    args = parser.parse_args()
    versions = pinned()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = [f"{name}=={versions[name]}" for name in FROM_SOURCE]
    # Built without torch in sight, DeepSpeed is pure Python, and compiles what it needs where it runs.
    building = os.environ | {"PIP_CONSTRAINT": str(LOCK)}
    subprocess.run([*pip, "wheel", "--no-deps", "--use-pep517", "-w", args.folder, *source], check=True, env=building)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
    platforms += ["--platform=manylinux2014_x86_64"]
    wheels = [f"{name}=={versions[name]}" for name in PACKAGES | ON_A_GPU if name not in FROM_SOURCE]
    subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", f"--python-version={args.python}", *platforms]
        + ["--implementation=cp", "-d", args.folder, *wheels],
        check=True,
    )
    files = sorted(args.folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 1e6:8.2f} MB  in all")
    print(f"on the machine:  python -m pip install --no-index --no-deps {args.folder}/*.whl")


def pinned() -> dict[str, str]:
    """Return the versions of requirements/lock.txt by distribution, and of gpu.txt what only a GPU needs."""
    texts = ((REQUIREMENTS / name).read_text(encoding="utf-8") for name in ("gpu.txt", "lock.txt"))
    return dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(texts), re.MULTILINE))


if __name__ == "__main__":
    main()
