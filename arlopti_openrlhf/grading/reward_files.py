"""Names the package's own rewards: its files, which `kk` and `math` stand for, and its server."""

from pathlib import Path

# The paths are this process's own. A cluster's nodes may have the package in different folders, so the process that
# loads a file looks it up here.
REWARD_FILES = {name: str(Path(__file__).with_name(f"{name}_reward.py")) for name in ("kk", "math")}

# What the server calls itself at /health, by which the pre-flight knows it from any other.
SERVER = "arlopti_openrlhf"
