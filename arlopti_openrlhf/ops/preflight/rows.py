"""Loads data sets through OpenRLHF's own functions, so that a check sees what the run would see."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arlopti_openrlhf.upstream import find_source

if TYPE_CHECKING:
    import datasets

Row = dict[str, Any]


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


def blend(names: str, split: str, most: int, probabilities: str | None = None, seed: int = 42) -> "datasets.Dataset":
    """Return data sets as the run joins them, images as they are stored. The run finds them in the cache afterwards.

    Args:
        names: as --data.prompt_dataset has them.
        split: the split to take if a data set has several.
        most: how many rows the run takes of each.
        probabilities, seed: as --data.prompt_probs and --train.seed have them.

    Raises:
        Unreadable, NotChecked: see there. It is not checked if it is not on this machine.
    """
    import datasets

    blending_datasets = upstream_names("openrlhf.datasets.utils", load_dataset=_load_dataset)["blending_datasets"]
    strategy = SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False, args=SimpleNamespace(use_ms=False))
    try:
        with _quiet():
            blended = blending_datasets(names, probabilities, strategy, seed, most, dataset_split=split)
            # Decoding images would take most of the time.
            features = {name: _undecoded(feature) for name, feature in blended.features.items()}
            return blended.cast(datasets.Features(features)) if features != blended.features else blended
    except (Unreadable, NotChecked):
        raise
    except Exception as error:  # `datasets` raises anything, with the cause behind it
        message = str(error.__cause__ or error).strip() or "there is no such file, or it has no rows"
        if message == "'DatasetDict' object has no attribute 'select'":
            message = f"it has no split {split}"
        raise Unreadable(message.splitlines()[0][:300]) from None


def _load_dataset(
    path: str,
    data_files: str | None = None,
    data_dir: str | None = None,
    trust_remote_code: bool = False,  # of a script, which `datasets` does not run any more
) -> Any:
    import datasets

    if not path:
        raise Unreadable("an empty name, as from a comma too many")
    is_here = data_files or trust_remote_code or Path(path).is_dir() or (data_dir and Path(data_dir).is_dir())
    if not is_here or "://" in (data_files or ""):
        raise NotChecked("it is not on this machine")
    return datasets.load_dataset(path, data_files=data_files, data_dir=data_dir)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from printing its progress, and from logging what it raises, too."""
    import datasets

    verbosity, has_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if has_bars:
            datasets.enable_progress_bars()


def _undecoded(feature: Any) -> Any:
    """Return the type of a column with its images as they are stored."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    return datasets.List(_undecoded(feature.feature)) if isinstance(feature, datasets.List) else feature
