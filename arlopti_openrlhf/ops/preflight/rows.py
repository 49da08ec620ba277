"""Reads the rows of a data set from where OpenRLHF's `blending_datasets` would, and says where one is bad."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
# Bytes of each file that are parsed, which takes a second or two. Of a larger file, a part is.
PARSED_BYTES = 64 * 2**20
_LOADED_ROWS = 20_000  # that many are taken from a data set that `datasets` has loaded
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class Unreadable(ValueError):
    """Says why the run could not read the data set."""


class NotChecked(Exception):
    """Says why a data set that the run may well be able to read is not looked at."""


def read_rows(name: str, split: str) -> Iterator[tuple[str, Row | None]]:
    """Yield where each row stands ("line 3") and the row, or None for one that is left out of a large data set.

    Args:
        name: what stands between two commas of --data.prompt_dataset.
        split: the split to take where the data set has several.

    Raises:
        Unreadable: the run could not read it.
        NotChecked: it is not on this machine, or could only be read as slowly as the run does.
    """
    name, _, data_dir = (part.strip() for part in name.partition("@"))
    path = Path(name)
    suffix = path.suffix  # as upstream, which knows the formats in lower case alone
    try:
        if not name:
            raise Unreadable("an empty name, as from a comma too many")
        if suffix == ".py" or (path.is_dir() and (path / f"{path.name}.py").exists()):
            raise NotChecked("a script makes the data")
        if suffix in _FORMATS and not path.is_file():
            raise Unreadable("there is no such file")
        if suffix in _FORMATS and split != "train":
            raise Unreadable(f"a file has the split train alone, not {split}")
        if suffix in (".json", ".jsonl"):
            yield from _json_rows(path)
        elif suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix in _FORMATS or path.is_dir():
            yield from _loaded_rows(path, data_dir, split)
        elif path.is_file():
            raise Unreadable(f"OpenRLHF reads files whose names end in {', '.join(_FORMATS)}")
        elif _ON_THE_HUB.fullmatch(name):
            raise NotChecked("there is no such file or folder, so the run looks for it on the hub")
        else:
            raise Unreadable("there is no such file or folder")
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _json_rows(path: Path) -> Iterator[tuple[str, Row | None]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"["):
            if size > PARSED_BYTES:
                raise NotChecked(f"one JSON list of {size / 2**20:.0f} MiB")
            rows = _parse(file.read(), "the file")
            yield from ((f"row {i}", _row(row, f"row {i}")) for i, row in enumerate(rows, start=1))
            return
        # A seeded draw, so that two looks at one file say the same.
        rng, share = random.Random(0), PARSED_BYTES / max(size, 1)
        for number, line in enumerate(file, start=1):
            where = f"line {number}"
            if not line.strip():
                continue
            if share < 1 and rng.random() > share:
                yield where, None
            else:
                yield where, _row(_parse(line, where), where)


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"no JSON: {error}"
        raise Unreadable(f"{where} is {problem}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise Unreadable(f"{where} is not an object with keys: {str(value)[:60]}")
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row | None]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        parsed_bytes = number = 0
        for batch in file.iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
            parsed_bytes += batch.nbytes
            if parsed_bytes > PARSED_BYTES:
                break
        yield from ((f"row {i}", None) for i in range(number + 1, file.metadata.num_rows + 1))
    except pyarrow.ArrowException as error:
        raise Unreadable(_first_line(error)) from None


def _loaded_rows(path: Path, data_dir: str, split: str) -> Iterator[tuple[str, Row | None]]:
    """Yield the rows of a file or a folder that `datasets` reads."""
    import datasets

    datasets.disable_progress_bars()
    is_saved = (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()
    if not is_saved:
        size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
        if size > PARSED_BYTES:
            raise NotChecked(f"{size / 2**20:.0f} MiB that the run converts first")
    try:
        if is_saved:
            data = datasets.load_from_disk(str(path))
        elif path.is_dir():
            data = datasets.load_dataset(str(path), data_dir=data_dir or None)
        else:
            data = datasets.load_dataset(path.suffix[1:], data_files=str(path))
    except Exception as error:  # `datasets` raises anything, with the cause behind it
        raise Unreadable(_first_line(error.__cause__ or error)) from None
    if not isinstance(data, datasets.Dataset):
        if split not in data:
            raise Unreadable(f"it has no split {split}, but {', '.join(data)}")
        data = data[split]
    for number in range(len(data)):
        yield f"row {number + 1}", data[number] if number < _LOADED_ROWS else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
