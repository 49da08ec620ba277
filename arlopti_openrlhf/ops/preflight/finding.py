"""What a check of the pre-flight gets and what it says."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import NamedTuple

from arlopti_openrlhf import terminal


@dataclass(frozen=True)
class Finding:
    """A reason why a run with these flags would fail, or would not do what its user wants."""

    flag: str  # the flag or variable at fault, as in `--data.max_len`. Empty where there is none
    value: object  # as the user gave it
    problem: str
    remedy: str
    is_fatal: bool = True  # the run cannot start. Otherwise it starts, and the finding is a warning

    @classmethod
    def of(cls, args: SimpleNamespace, flag: str, problem: str, remedy: str, is_fatal: bool = True) -> "Finding":
        """Return a finding about a flag of the arguments, such as "data.max_len", with the value that it has there."""
        return cls(f"--{flag}", attrgetter(flag)(args), problem, remedy, is_fatal)

    def __str__(self) -> str:
        subject = f"{self.flag} {self.value}".strip() + ": " if self.flag else ""
        return terminal.one_line(f"{subject}{self.problem}; {self.remedy}")


class Update(NamedTuple):
    """How a run computes its update, as far as checks depend on it."""

    # Each rollout batch is trained in whole optimizer steps, and DeepSpeed is told where each of them ends. OpenRLHF's
    # own loop carries a rest over to the next rollout batch.
    takes_whole_steps: bool


def first_of(problems: Sequence[str], others: str = "more") -> str:
    """Return the first problem, and how many others there are."""
    return problems[0] + (f" (and {len(problems) - 1} {others})" if len(problems) > 1 else "")


def in_words(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# A check looks at upstream's nested arguments, as its `train` gets them. Text is for the user of a run that can start.
Answer = Finding | str
Check = Callable[[SimpleNamespace], Iterable[Answer]]
