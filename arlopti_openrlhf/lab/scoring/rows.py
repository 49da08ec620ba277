"""Reads the problems that `cli.prepare_data` wrote, and says in which line one is bad."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]  # prompt, label, datasource


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
