"""What a check of the pre-flight says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Says that a run with these flags would fail, or would not do what its user wants.

    Attributes:
        flag: the flag at fault, as in `--data.max_len`. Empty where no flag is.
        value: its value, as the user gave it.
        problem: what is wrong.
        remedy: what to do.
        is_fatal: the run cannot start. Otherwise it starts, and the finding is a warning.
    """

    flag: str
    value: object
    problem: str
    remedy: str
    is_fatal: bool = True

    def __str__(self) -> str:
        subject = f"{self.flag} {self.value}: " if self.flag else ""
        return f"{subject}{self.problem}; {self.remedy}"
