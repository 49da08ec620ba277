"""Loads the first rows of data sets through OpenRLHF's own functions, so that a check sees what the run would see."""

import json
import re
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arlopti_openrlhf.upstream import find_source

if TYPE_CHECKING:
    import datasets

Row = dict[str, Any]

# Bytes of a data set that are read. `datasets` reads 62 MiB of short rows in 1.5 s.
READ_BYTES = 64 * 2**20
_BATCH = 1000  # rows that are read at a time
_FORMATS = ".json, .jsonl, .csv, .parquet, .arrow"
_KINDS = ("json", "csv", "parquet", "arrow", "text")  # of the files of a folder, as in json@FOLDER
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class Unreadable(ValueError):
    """The run could not read the data set."""


class NotChecked(Exception):
    """The run may well be able to read the data set, but it is not looked at."""


def upstream_names(module: str, **replaced: Any) -> dict[str, Any]:
    """Return the names of one of OpenRLHF's modules, some of them replaced, without an import of its package.

    The package imports DeepSpeed, which takes many seconds.
    """
    path = find_source(module)
    names: dict[str, Any] = {}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), names)  # noqa: S102
    unknown = replaced.keys() - names
    if unknown:
        raise LookupError(f"{module} has no {', '.join(unknown)}")
    names.update(replaced)
    return names


class FirstRows:
    """Blends data sets by OpenRLHF's `blending_datasets`, which gets the first rows of each in place of all.

    Args:
        split: the split to take if a data set has several.
        most_bytes: how much is read of each, and a few rows more.
    """

    def __init__(self, split: str, most_bytes: int | None = None) -> None:
        self.split, self.most_bytes = split, READ_BYTES if most_bytes is None else most_bytes
        self._read: dict[tuple, tuple[Any, bool]] = {}  # what was loaded, and whether these are all rows

    def blend(
        self, names: str, most: int, probabilities: str | None = None, seed: int = 42
    ) -> tuple["datasets.Dataset", bool]:
        """Return the rows of data sets, images as they are stored, and whether the run has no others.

        Args:
            names: as --data.prompt_dataset has them.
            most: how many rows the run takes of each.
            probabilities, seed: as --data.prompt_probs and --train.seed have them.

        Raises:
            Unreadable, NotChecked: see there. It is not checked if it is not on this machine.
        """
        import datasets

        loaders = {"load_dataset": self._load_dataset, "load_from_disk": self._load_from_disk}
        blending_datasets = upstream_names("openrlhf.datasets.utils", **loaders)["blending_datasets"]
        strategy = SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False, args=SimpleNamespace(use_ms=False))
        verbosity = datasets.logging.get_verbosity()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised, too
        self._wholes: list[bool] = []
        try:
            blended = blending_datasets(names, probabilities, strategy, seed, most, dataset_split=self.split)
            return blended, all(self._wholes) or len(blended) >= most
        except (Unreadable, NotChecked):
            raise
        except Exception as error:  # `datasets` raises anything, with the cause behind it
            raise _unreadable(names, error) from None
        finally:
            datasets.logging.set_verbosity(verbosity)

    def _load_from_disk(self, path: str) -> Any:
        import datasets

        return self._first_rows((path,), lambda: datasets.load_from_disk(path))

    def _load_dataset(
        self,
        path: str,
        data_files: str | None = None,
        data_dir: str | None = None,
        trust_remote_code: bool = False,
    ) -> Any:
        import datasets

        if not path:
            raise Unreadable("an empty name, as from a comma too many")
        if (path,) in self._read:  # `load_from_disk` has read it, and upstream has caught what was raised
            return self._first_rows((path,), None)
        if trust_remote_code:
            if int(datasets.__version__.partition(".")[0]) < 4:
                raise NotChecked("a script makes the data")
            raise Unreadable(f"a script makes the data, which datasets {datasets.__version__} does not run")
        if "://" in path or "://" in (data_files or ""):
            raise NotChecked("it is not on this machine")
        if data_files and not (Path(data_files).is_file() or glob(data_files)):
            raise Unreadable("there is no such file")
        is_folder = Path(path).is_dir() or (path in _KINDS and data_dir and Path(data_dir).is_dir())
        if not data_files and not is_folder:
            if Path(path).exists():
                raise Unreadable(f"OpenRLHF reads files whose names end in {_FORMATS}")
            if not _ON_THE_HUB.fullmatch(path):
                raise Unreadable("there is no such file or folder")
            raise NotChecked("there is no such file or folder, so the run looks for it on the hub")

        def load() -> Any:
            try:
                return datasets.load_dataset(path, data_files=data_files, data_dir=data_dir, streaming=True)
            except StopIteration:  # which `datasets` raises for a file without rows
                return {self.split: datasets.Dataset.from_dict({})}

        return self._first_rows((path, data_files, data_dir), load)

    def _first_rows(self, key: tuple, load: Any) -> Any:
        """Return what `load` returns, with the first rows of the split that is wanted."""
        if key not in self._read:
            self._read[key] = self._beginning(load())
        data, is_whole = self._read[key]
        self._wholes.append(is_whole)
        if data is None:
            raise Unreadable(f"it has no split {self.split}, but {self._splits}")
        return data

    def _beginning(self, data: Any) -> tuple["datasets.Dataset | None", bool]:
        import datasets
        import pyarrow

        if isinstance(data, dict):
            self._splits = ", ".join(data)
            if self.split not in data:
                return None, True
            data = data[self.split]
        tables: list[pyarrow.Table] = []
        is_whole = True
        for table in data.with_format("arrow").iter(_BATCH):
            if tables and sum(each.nbytes for each in tables) > self.most_bytes:
                is_whole = False
                break
            tables.append(table)
        if not tables:
            return datasets.Dataset.from_dict({}), True
        # The types of the columns are those that the run has. Decoding images would take most of the time.
        features = datasets.Features.from_arrow_schema(tables[0].schema)
        features = datasets.Features({name: _undecoded(feature) for name, feature in features.items()})
        table = pyarrow.concat_tables(tables).replace_schema_metadata(features.arrow_schema.metadata)
        return datasets.Dataset(table), is_whole


def as_objects(data: "datasets.Dataset", name: str) -> list[Row]:
    """Return the rows of a data set as Python's objects, which is what the run gets.

    Raises:
        Unreadable: a row cannot be read.
    """
    try:
        return list(data)
    except Exception as error:
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: Exception) -> Unreadable:
    message = str(error.__cause__ or error).strip() or type(error).__name__
    if "\nPlease pick one" in message:  # of the configurations of a folder with several
        message = f"{' '.join(message.splitlines()[:2])}, as a subfolder: {name}@SUBFOLDER"
    return Unreadable(_bad_line(Path(name)) or message.splitlines()[0][:300])


def _undecoded(feature: Any) -> Any:
    """Return the type of a column with its images as they are stored."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    return datasets.List(_undecoded(feature.feature)) if isinstance(feature, datasets.List) else feature


def _bad_line(path: Path) -> str | None:
    """Return which line of a JSON Lines file is at fault. The messages of `datasets` leave that out."""
    if path.suffix != ".jsonl" or not path.is_file():
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
