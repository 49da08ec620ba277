"""Name models and data sources in files and tables, and sort the names as people do."""

import re
from collections.abc import Sequence
from pathlib import Path


def model_name(model: str) -> str:
    """Return a model's short name: its directory's, or what follows the organisation on the Hugging Face hub."""
    return Path(model).absolute().name if Path(model).exists() else model.rsplit("/", 1)[-1]


def natural_key(name: str) -> list[int | str]:
    """Return a sort key that compares numbers by value, so that "step9" comes before "step10"."""
    # Split at its numbers, a name is text, number, text, ..., text. So only like is compared with like.
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def expand_models(values: Sequence[str]) -> dict[str, str]:
    """Return {name: model}. A directory without a model of its own stands for the checkpoints in it.

    Raises:
        ValueError: a directory holds no model, or two models have one name.
    """
    # A name on the hub and a directory with a model stand for themselves.
    found: list[str] = []
    for value in values:
        path = Path(value)
        if not path.is_dir() or (path / "config.json").exists():
            found.append(value)
            continue
        inside = [folder.parent for folder in path.glob("*/config.json")]
        if not inside:
            raise ValueError(f"--model {value}: no config.json in the directory, nor in one below it")
        found += map(str, sorted(inside, key=lambda folder: natural_key(folder.name)))
    # Names are those of folders and of rows in tables, so no two may be alike.
    names = [model_name(model) for model in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--model: two models have one name: {', '.join(twice)}")
    return dict(zip(names, found, strict=True))
