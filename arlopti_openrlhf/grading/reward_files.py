"""Finds the reward files of the package, for the commands that take `kk` or `math` in place of a path."""

from pathlib import Path

# The paths are this process's own. A cluster's nodes may have the package in different folders, so the process that
# loads a file looks it up here.
REWARD_FILES = {name: str(Path(__file__).with_name(f"{name}_reward.py")) for name in ("kk", "math")}
