"""Shows a bar for each phase of an analysis, and says before the long ones how much time they take."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """Counts work, in tokens of a forward pass. `rate` is the work per second so far."""

    def __init__(self) -> None:
        self._bar = tqdm(disable=True)
        self._work, self._seconds = 0.0, 0.0

    @property
    def rate(self) -> float:
        return self._work / self._seconds

    def advance(self, work: float) -> None:
        """Move the bar of the current phase."""
        self._work += work
        self._bar.update(min(work, self._bar.total - self._bar.n) if self._bar.total else 0)

    @contextmanager
    def phase(self, name: str, work: float) -> Iterator[None]:
        """Show a bar while the context lasts. `work` is an estimate."""
        start = time.monotonic()
        form = f"{name:<18} {{percentage:3.0f}}%|{{bar:30}}| {{elapsed}}<{{remaining}}"
        interval = 0.5 if sys.stderr.isatty() else 15  # a log gets a line now and then
        with tqdm(total=work, bar_format=form, mininterval=interval) as self._bar:
            yield
            self._bar.update(work - self._bar.n)
        self._seconds += time.monotonic() - start
