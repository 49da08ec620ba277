"""Grades Knights-and-Knaves and math responses, in process or behind an HTTP server."""

import importlib.util
from types import ModuleType
from typing import Any, NamedTuple


class Reward(NamedTuple):
    """A reward of the package: the file `NAME_reward.py` here, and this row, from which the commands know it.

    Its `reward_func` returns `rewards`, `scores` and the extra log `well_formed`, and raises a ValueError for a label
    that it cannot read.
    """

    name: str  # what commands take in place of a path
    labels_per_second: int  # that it reads, about
    sources: str = ""  # how the names of the data sources begin that it grades, unless a command is given a reward
    package: str = ""  # that it needs
    label_module: str = ""  # here, if labels are more than text: `label_text` and `problem`
    has_workers: bool = False  # it grades in processes of its own, which `worker_pool` starts

    @property
    def path(self) -> str:
        """The file, in this process. The nodes of a cluster may have the package in different folders."""
        spec = importlib.util.find_spec(f"{__name__}.{self.name}_reward")
        assert spec and spec.origin
        return spec.origin

    @property
    def module(self) -> ModuleType:
        """The file as a module, which imports PyTorch."""
        return importlib.import_module(f"{__name__}.{self.name}_reward")

    def label_text(self, label: Any) -> str:
        """Return a label as text. ValueError if the reward cannot read it."""
        if self.label_module:
            return self._labels.label_text(label)
        self.module.reward_func([""], [""], [label])
        return label

    def label_problem(self, label: Any) -> str | None:
        """Return why the answers that people write may never meet a label, or None."""
        return self._labels.problem(label) if self.label_module else None

    @property
    def _labels(self) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.label_module}")


_ROWS = (
    Reward("kk", 20_000, sources="kk_"),
    Reward("math", 100, package="math-verify", label_module="math_labels", has_workers=True),
    Reward("math_boxed", 100, "math_boxed_", package="math-verify", label_module="math_labels", has_workers=True),
)
REWARDS = {row.name: row for row in _ROWS}
