"""Name models and data sources in files and tables, and sort the names as people do."""

import re
from pathlib import Path


def model_name(model: str) -> str:
    """Return a model's short name: its directory's, or what follows the organisation on the Hugging Face hub."""
    return Path(model).absolute().name if Path(model).exists() else model.rsplit("/", 1)[-1]


def natural_key(name: str) -> list[int | str]:
    """Return a sort key that compares numbers by value, so that "step9" comes before "step10"."""
    # Split at its numbers, a name is text, number, text, ..., text. So only like is compared with like.
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
