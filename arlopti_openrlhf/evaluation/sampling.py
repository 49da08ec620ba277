"""Parse and choose how an evaluation samples each data source, as in "aime:n=16,t=1.0"."""

import argparse
import fnmatch
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Sampling(NamedTuple):
    """How to answer the problems of the sources that match `pattern`: n responses each, at this temperature."""

    pattern: str
    n: int
    temperature: float

    def __str__(self) -> str:
        temperature = f"{self.temperature:.9f}".rstrip("0").rstrip(".")
        return f"{self.pattern}:n={self.n},t={temperature}"


def parse_sampling(text: str) -> Sampling:
    """Parse a specification: "aime:n=16,t=1.0" gives Sampling("aime", 16, 1.0).

    Raises:
        ArgumentTypeError: it has another form, or asks for several samples at temperature 0.
    """
    match = re.fullmatch(r"(.+):n=(\d+),t=(\d+\.?\d*|\.\d+)", text)
    if not match or int(match[2]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PATTERN:n=N,t=T, as in aime:n=16,t=1")
    sampling = Sampling(match[1], int(match[2]), float(match[3]))
    if sampling.n > 1 and not sampling.temperature:
        raise argparse.ArgumentTypeError(f"{text!r}: at temperature 0 all samples are the same, so n must be 1")
    return sampling


def sampling_of(source: str, specs: Sequence[Sampling]) -> Sampling:
    """Return the last specification that matches the source. The first must match every source."""
    return [s for s in specs if fnmatch.fnmatchcase(source, s.pattern)][-1]


def samplings_of(source: str, specs: Sequence[Sampling]) -> list[Sampling]:
    """Return the specifications with the last pattern that matches the source, which are several ways to sample it.

    The first one is a default, which matches every source and counts if no other does.
    """
    default, *given = specs
    matching = [s for s in given if fnmatch.fnmatchcase(source, s.pattern)] or [default]
    return list(dict.fromkeys(s for s in matching if s.pattern == matching[-1].pattern))


def unmatched(specs: Sequence[Sampling], sources: Collection[str]) -> list[str]:
    """Return the patterns that match none of the sources."""
    return [s.pattern for s in specs if not any(fnmatch.fnmatchcase(source, s.pattern) for source in sources)]
