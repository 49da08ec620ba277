"""Read what is evaluated: models by name or folder, and the problems that `cli.prepare_data` wrote."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # prompt, label, datasource


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


def read_rows(files: Sequence[str]) -> list[tuple[str, Row]]:
    """Return where each row of JSON lines or parquet stands ("FILE, line 3"), and the row, in the order of the files.

    Raises:
        OSError, ValueError: a file cannot be read, there is no row, or one lacks prompt, label or datasource.
    """
    rows = []
    for file in files:
        for where, row in _read(file):
            names = ("prompt", "label", "datasource")
            missing = [n for n in names if not isinstance(row, dict) or row.get(n) in (None, "", [])]
            if missing:
                raise ValueError(f"{where}: a row has no {', '.join(missing)}: {json.dumps(row, default=str)[:100]}")
            if not isinstance(row["datasource"], str):
                raise ValueError(f"{where}: its datasource is not text: {row['datasource']!r}")
            rows.append((where, row))
    if not rows:
        raise ValueError(f"{', '.join(files)}: no rows")
    return rows


def _read(file: str) -> Iterator[tuple[str, Any]]:
    if file.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        try:
            table = parquet.read_table(file).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file}: not a readable parquet file ({' '.join(str(error).split())})") from None
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(table, start=1))
        return
    # Line by line: `splitlines` would also split at a line separator (U+2028) inside a prompt.
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from None


def check_labels(rows: Sequence[tuple[str, Row]]) -> None:
    """Let the graders read every label, which imports PyTorch.

    Raises:
        ValueError: one cannot be read.
    """
    from arlopti_openrlhf.grading import kk_reward, math_reward

    for where, row in rows:
        try:
            if str(row["datasource"]).startswith("kk_"):
                kk_reward.grade("", row["label"])
            else:
                math_reward.label_text(row["label"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
