"""Token methods, one file each. `token_method.py` says what such a file holds. This module imports nothing heavy."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent


def built_in() -> list[str]:
    """Return the names of the package's own methods."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def name_of(source: str) -> str:
    """Return the name of a method given by name or by file: that of the file without its folder and ending."""
    return Path(source).stem if source.endswith(".py") else source


def requested(algo: SimpleNamespace) -> tuple[list[str], list[str]]:
    """Return the sources and the arguments of the token methods that the flags `--algo.*` switch on.

    `--algo.lopti.*` and `--algo.ar.alpha` are short for the methods `lopti` and `ar` with these constants. They come
    first where `--algo.token_method` does not name them.
    """
    lopti, shorthands = algo.lopti, []
    if lopti.eta is not None or lopti.quantile is not None:
        shorthands.append("lopti")
    if algo.ar.alpha:
        shorthands.append("ar")
    sources = [name for name in shorthands if name not in algo.token_method] + algo.token_method
    values = {"ar.alpha": algo.ar.alpha}
    values |= {f"lopti.{name}": vars(lopti)[name] for name in ("eta", "quantile", "order", "groups")}
    # What a flag leaves at its default is free for `--algo.token_method_args`.
    arguments = [
        f"{key}={value}"
        for key, value in values.items()
        if key.partition(".")[0] in sources and value not in (None, "low_first", "both")
    ]
    return sources, arguments + algo.token_method_args


def parse_argument(argument: str) -> tuple[str, str, Any]:
    """Return name, key and value of `name.key=value`. The value is a number, true, false, or else text.

    Raises:
        ValueError: it has not that form.
    """
    path, _, text = argument.partition("=")
    name, _, key = path.rpartition(".")
    if not (name and key.isidentifier() and text):
        raise ValueError(f"{argument} is not of the form NAME.KEY=VALUE, as in stapo.tau=0.01")
    if text.lower() in ("true", "false"):
        return name, key, text.lower() == "true"
    for kind in (int, float):
        try:
            return name, key, kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"-?\d*,\d+", text):  # a decimal comma
        raise ValueError(f"{argument} is neither a number nor a word; write {path}={text.replace(',', '.')}")
    return name, key, text
