"""Triton's kernels compute what plain torch does. Triton's interpreter runs them on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
LM_HEAD = Path(__file__).parents[1] / "forward/test_lm_head.py"


def test_the_lm_head_in_tritons_interpreter(tmp_path):
    """Triton, 1 GB, belongs to PyTorch's builds for CUDA. It is installed for this test alone."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "triton"]
    subprocess.run(install, check=True, timeout=600)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(LM_HEAD)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and " passed" in last and "[triton" in done.stdout, done.stdout
