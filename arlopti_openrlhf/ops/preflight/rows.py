"""Reads the rows of a data set from where OpenRLHF's `blending_datasets` would, without converting it first."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class Unreadable(ValueError):
    """The run could not read the data set."""


class NotChecked(Exception):
    """The run may well be able to read the data set, but it is not looked at."""


def read_rows(name: str, split: str) -> Iterator[Row]:
    """Yield the rows of a data set, with its images as they are stored.

    Args:
        name: what stands between two commas of --data.prompt_dataset.
        split: the split to take where the data set has several.

    Raises:
        Unreadable, NotChecked: see there. It is not checked where it is not on this machine, or a script makes it.
    """
    name, _, data_dir = (part.strip() for part in name.partition("@"))
    path = Path(name)
    if not name:
        raise Unreadable("an empty name, as from a comma too many")
    if path.suffix == ".py" or (path.is_dir() and (path / f"{path.name}.py").exists()):
        raise NotChecked("a script makes the data")
    # As upstream, which knows the formats in lower case alone.
    if path.suffix in _FORMATS and not path.is_file():
        raise Unreadable("there is no such file")
    if path.is_file() and path.suffix not in _FORMATS:
        raise Unreadable(f"OpenRLHF reads files whose names end in {', '.join(_FORMATS)}")
    if not path.exists():
        if _ON_THE_HUB.fullmatch(name):
            raise NotChecked("there is no such file or folder, so the run looks for it on the hub")
        raise Unreadable("there is no such file or folder")
    yield from _stream(path, data_dir, split)


def _stream(path: Path, data_dir: str, split: str) -> Iterator[Row]:
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised, too
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            data = datasets.load_from_disk(str(path))
        elif path.is_dir():
            data = datasets.load_dataset(str(path), data_dir=data_dir or None, streaming=True)
        else:
            data = datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), streaming=True)
        if not isinstance(data, datasets.Dataset | datasets.IterableDataset):
            if split not in data:
                raise Unreadable(f"it has no split {split}, but {', '.join(data)}")
            data = data[split]
        if isinstance(data, datasets.Dataset):
            data = data.to_iterable_dataset()
        for column, feature in (data.features or {}).items():
            data = data.cast_column(column, _undecoded(feature)) if _undecoded(feature) != feature else data
        yield from data
    except (Unreadable, StopIteration):  # the second is what `datasets` raises for a file without rows
        if path.is_dir() or path.stat().st_size:
            raise
    except Exception as error:  # `datasets` raises anything, with the cause behind it
        message = str(error.__cause__ or error).strip() or type(error).__name__
        raise Unreadable(_bad_line(path) or message.splitlines()[0][:200]) from None
    finally:
        datasets.logging.set_verbosity(verbosity)


def _undecoded(feature: Any) -> Any:
    """Return the type of a column with its images as they are stored. Decoding them would take most of the time.

    `IterableDataset.decode(False)` would leave messages as JSON, too.
    """
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    return datasets.List(_undecoded(feature.feature)) if isinstance(feature, datasets.List) else feature


def _bad_line(path: Path) -> str | None:
    """Return which line of a JSON Lines file is at fault. The messages of `datasets` leave that out."""
    if path.suffix != ".jsonl":
        return None
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:
                problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"no JSON: {error}"
                return f"line {number} is {problem}"
            if not isinstance(row, dict):
                return f"line {number} is not an object with keys: {str(row)[:60]}"
    return None
