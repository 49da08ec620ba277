"""Loads the data sets of a run by OpenRLHF's own function, and keeps the rows that the run will use."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.model import is_on_hub

if TYPE_CHECKING:
    import datasets

Row = dict[str, Any]

TRAINING, EVALUATION = "--data.prompt_dataset", "--eval.dataset"
_ALL = 10**8  # rows, as many as upstream takes of each data set to evaluate on before it joins them
_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # of the files that upstream reads
_READ = 100_000  # rows of a data set that are looked at, in a few seconds


class DataSet(NamedTuple):
    """The rows of one data set that the run uses."""

    flag: str  # where it was named
    name: str
    rows: list[Row]  # the first is row 1
    types: "datasets.Features"  # of the columns


def read(flag: str, args: SimpleNamespace) -> tuple[list[DataSet], int | None, list[Finding]]:
    """Read the data sets of a flag one by one, and as the run joins them.

    Return them, how many rows the run takes of the whole, or None if that is not known, and what is wrong with them.
    """
    found: list[Finding] = []
    if not args.eval.dataset and flag == EVALUATION:
        return [], None, found
    names, split, most = args.data.prompt_dataset, args.data.prompt_split, args.data.max_samples
    probabilities = args.data.prompt_probs
    if flag == EVALUATION:
        names, split, most, probabilities = args.eval.dataset, args.eval.split, _ALL, None
    whole: list[tuple[str, datasets.Dataset]] = []
    for name in map(str.strip, names.split(",")):
        try:
            whole.append((name, blend(name, split, _ALL)))
        except ConnectionError:  # it is offline
            problem = "not checked: it is not on this machine"
            found.append(Finding(flag, name, problem, "look at its first rows yourself", is_fatal=False))
        except Exception as error:  # `datasets` raises anything
            found.append(Finding(flag, name, _cause(error, split), _remedy(name)))
    taken, total = [min(most, len(each)) for _, each in whole], None
    if len(whole) == len(names.split(",")):
        try:
            total = len(blend(names, split, most, probabilities, args.train.seed))
            if probabilities is None:
                taken, cut = _cut(flag, names.split(","), [len(each) for _, each in whole], args)
                found += cut
        except Exception as error:
            problem = f"the data sets cannot be joined: {_cause(error, split)}"
            remedy = "give each column one type in all of them, and a probability for each if for any"
            found.append(Finding(flag, names, problem, remedy))
    sets = []
    for (name, each), number in zip(whole, taken, strict=True):
        try:
            sets.append(DataSet(flag, name, list(each.select(range(min(_READ, number)))), each.features))
        except Exception as error:  # of a row, too
            found.append(Finding(flag, name, _cause(error, split), _remedy(name)))
    return sets, total and min(total, args.data.max_samples), found


def _cut(
    flag: str, names: Sequence[str], numbers: Sequence[int], args: SimpleNamespace
) -> tuple[list[int], list[Finding]]:
    """Return how many rows of each data set the run takes, which takes the first of all, and a finding on the rest."""
    taken: list[int] = []
    total = sum(numbers)
    for number in numbers:
        taken.append(min(number, args.data.max_samples - sum(taken)))
    of_all = f"of the {total} rows of {flag} OpenRLHF takes the first {sum(taken)}"
    if without := [name.strip() for name, number in zip(names, taken, strict=True) if not number]:
        problem, remedy = f"{of_all}, and none of {', '.join(without)}", f"give at least {total}, or leave it out"
        return taken, [Finding.of(args, "data.max_samples", problem, remedy)]
    if sum(taken) < total and flag == EVALUATION:
        remedy = f"give at least {total} to evaluate on all"
        return taken, [Finding.of(args, "data.max_samples", of_all, remedy, is_fatal=False)]
    return taken, []


def blend(names: str, split: str, most: int, probabilities: str | None = None, seed: int = 42) -> "datasets.Dataset":
    """Return data sets as the run joins them, images as they are stored. The run finds them in the cache afterwards.

    Args:
        names: as --data.prompt_dataset has them.
        split: the split to take if a data set has several.
        most: how many rows the run takes of each.
        probabilities, seed: as --data.prompt_probs and --train.seed have them.

    Raises:
        ConnectionError: it is on another machine.
        Exception: OpenRLHF, or `datasets`, cannot read it.
    """
    import datasets
    from openrlhf.datasets.utils import blending_datasets

    if "://" in names:
        raise ConnectionError
    if not all(map(str.strip, names.split(","))):
        raise ValueError("an empty name, as from a comma too many")
    strategy = SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False, args=SimpleNamespace(use_ms=False))
    try:
        blended = blending_datasets(names, probabilities, strategy, seed, most, dataset_split=split)
    except ConnectionError:
        if any(map(_is_local, map(str.strip, names.split(",")))):
            raise FileNotFoundError("there is no such file or folder") from None
        raise
    # Decoding images would take most of the time.
    features = datasets.Features({name: _undecoded(feature) for name, feature in blended.features.items()})
    return blended.cast(features) if features != blended.features else blended


def _is_local(name: str) -> bool:
    """Return whether a name that is not here cannot be the hub's."""
    path = name.partition("@")[0]
    return Path(path).exists() or Path(name).exists() or Path(path).suffix.lower() in _SUFFIXES or not is_on_hub(path)


def _cause(error: Exception, split: str) -> str:
    message = str(error.__cause__ or error).strip() or "there is no such file, or it has no rows"
    if message == "'DatasetDict' object has no attribute 'select'":
        message = f"it has no split {split}"
    return message.splitlines()[0][:300]


def _remedy(name: str) -> str:
    if "@" in name:
        return "correct the path or the data: OpenRLHF takes what follows an @ for a folder inside a data set"
    suffix = Path(name).suffix
    if suffix not in _SUFFIXES and suffix.lower() in _SUFFIXES:
        return f"OpenRLHF reads {suffix.lower()}, in small letters: rename the file"
    return "correct the path or the data"


def _undecoded(feature: Any) -> Any:
    """Return the type of a column with its images as they are stored."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    return datasets.List(_undecoded(feature.feature)) if isinstance(feature, datasets.List) else feature
