"""What the quickstart refuses; that it trains is seen in CI, at a reduced size."""

import subprocess
import sys


def test_a_folder_that_is_no_quickstarts_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("of the user")
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.quickstart", "--reduced", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"argument --out: {tmp_path} holds something else" in done.stderr
    assert (tmp_path / "data" / "precious.txt").exists()
