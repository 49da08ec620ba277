"""Triton's kernels, ours and Liger's, compute what plain torch does. Triton's interpreter runs them on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
LIGER = re.search(r"liger-kernel==[\d.]+", (ROOT / "setup.py").read_text("utf-8"))[0]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder with Triton and Liger. Triton, 1 GB, belongs to PyTorch's builds for CUDA."""
    folder = str(tmp_path_factory.mktemp("triton"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "triton", LIGER]
    subprocess.run(install, check=True, timeout=600)
    return folder


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("file", "shown"), [("test_lm_head.py", "[triton"), ("liger_kernels.py", "[qwen3")])
def test_in_tritons_interpreter(packages, file, shown):
    paths = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(ROOT / "tests/forward" / file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and " passed" in last and shown in done.stdout, done.stdout
