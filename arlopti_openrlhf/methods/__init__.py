"""Token methods, one file each. `token_method.py` says what such a file holds. This module imports nothing heavy."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def built_in() -> list[str]:
    """Return the names of the package's own methods."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def name_of(source: str) -> str:
    """Return the name of a method given by name or by file: that of the file without its folder and ending."""
    return Path(source).stem if source.endswith(".py") else source


def parse_argument(argument: str) -> tuple[str, str, Any]:
    """Return name, key and value of `name.key=value`. The value is a number, true, false, or else text.

    Raises:
        ValueError: it has not that form.
    """
    path, _, text = argument.partition("=")
    name, _, key = path.rpartition(".")
    if not (name and key.isidentifier() and text):
        raise ValueError(f"{argument} is not of the form NAME.KEY=VALUE, as in stapo.tau=0.01")
    if text in ("true", "false"):
        return name, key, text == "true"
    for kind in (int, float):
        try:
            return name, key, kind(text)
        except ValueError:
            continue
    return name, key, text
