"""Measures time in which this process could run: without a machine that sleeps, or a process that is halted.

Python's and the kernel's clocks run on meanwhile, so every limit by them would be over on waking.
"""

import time
from collections.abc import Callable

_SLICE = 1.0  # seconds. A sleeping machine can take no more than one slice of a wait


class Clock:
    """Counts the seconds in which this process could run: no more than `longest` seconds between two readings."""

    def __init__(self, longest: float = 5.0) -> None:
        self.longest, self._seconds, self._read = longest, 0.0, time.monotonic()

    def __call__(self) -> float:
        """Return the seconds so far."""
        before, self._read = self._read, time.monotonic()
        self._seconds += min(self._read - before, self.longest)
        return self._seconds


def succeeds(wait: Callable[[float], object], seconds: float) -> bool:
    """Return whether `wait` is true within so many seconds. It gets a number of seconds, and waits for no longer."""
    while seconds > 0:
        if wait(min(seconds, _SLICE)):
            return True
        seconds -= _SLICE
    return False
