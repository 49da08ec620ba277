"""OpenRLHF's own test-suite, with the CPU backend and our trainer in place."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

# OpenRLHF 0.11.2 has this many; fewer would mean that part of the suite was not collected.
UPSTREAM_TESTS = 221

PLUGIN = """
from arlopti_openrlhf import cpu
cpu.enable()
from arlopti_openrlhf import bindings
bindings.bind({bindings.SELECTIVE})
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_upstream_suite_passes(tmp_path):
    distribution = importlib.metadata.distribution("openrlhf")
    suite = distribution.locate_file("tests")
    assert any(str(file).startswith("tests/test_") for file in distribution.files), "openrlhf ships no tests any more"
    (tmp_path / "with_arlopti.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", str(suite), "-q", "-p", "with_arlopti", "-p", "no:cacheprovider"]
    # A configuration of its own, empty: pytest would otherwise look for one in the folders above the suite.
    config = tmp_path / "pytest.ini"
    config.write_text("[pytest]\n")
    done = subprocess.run(
        [*command, "-c", str(config), "--rootdir", str(suite)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed.group(1)) >= UPSTREAM_TESTS, output[-1000:]
