"""Grades Knights-and-Knaves and math responses, in process or behind an HTTP server."""

from pathlib import Path

# What commands take as `kk` or `math` in place of a path. The paths are this process's own. A cluster's nodes may have
# the package in different folders, so the process that loads a file looks it up here.
REWARD_FILES = {name: str(Path(__file__).with_name(f"{name}_reward.py")) for name in ("kk", "math")}
