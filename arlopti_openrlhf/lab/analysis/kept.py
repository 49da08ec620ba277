"""Writes figures as they are done. What an earlier run has made of the same batch and settings is kept."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arlopti_openrlhf import __version__
from arlopti_openrlhf.lab.analysis import plots
from arlopti_openrlhf.lab.analysis.rollouts import Batch

_KEYS = "kept.json"  # {figure: hash of all that it depends on}


class Kept:
    """The figures of one model in its folder.

    Args:
        folder: where they are.
        version: of the model, as `offline.version_of` returns it.
        batch: what they show.
        asked: {figure: settings that it depends on}.
    """

    def __init__(self, folder: Path, version: list, batch: Batch, asked: dict[str, Sequence]) -> None:
        self.folder = folder
        digest = hashlib.sha256()
        for tensor in vars(batch).values():
            digest.update(tensor.contiguous().numpy().tobytes())
        of_all = [__version__, version, digest.hexdigest()]
        self._keys = {name: _hash([name, *of_all, *settings]) for name, settings in asked.items()}

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the figures that are still to be made."""
        done = self._done()
        there = [name for name in names if (self.folder / f"{name}.json").exists()]
        return [name for name in names if name not in there or done.get(name) != self._keys[name]]

    def write(self, name: str, values: Any) -> None:
        """Write a figure and its data."""
        done = self._done()
        done.pop(name, None)
        write_json(done, self.folder / _KEYS)  # first: half a figure is none
        write_figure(name, values, self.folder)
        write_json(done | {name: self._keys[name]}, self.folder / _KEYS)

    def read(self, name: str) -> Any:
        """Return a figure's data."""
        return json.loads((self.folder / f"{name}.json").read_text("utf-8"))

    def _done(self) -> dict[str, str]:
        with suppress(OSError, ValueError):  # not there, or spoilt by a power loss
            return json.loads((self.folder / _KEYS).read_text("utf-8"))
        return {}


def _hash(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def write_figure(name: str, values: Any, folder: Path) -> None:
    """Write a figure as a picture and as JSON."""
    (folder / f"{name}.png").write_bytes(plots.png(name, values))
    write_json(values, folder / f"{name}.json")


def write_json(data: Any, path: Path) -> None:
    """Write data as JSON. ValueError for a number that is not finite, which JSON cannot express."""
    path.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
