"""Shows a person how far a run is: one line, with the output of Ray, vLLM, DeepSpeed and OpenRLHF in a file.

The file descriptors of standard output and standard error lead to the file, since C++ writes to them too. What is for
the user is taken from there: lines of this package, and warnings of OpenRLHF's and this package's loggers.
"""

import io
import os
import re
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO

import ray
from tqdm import tqdm

from arlopti_openrlhf.run import progress
from arlopti_openrlhf.run.progress import Progress

LOG = "train.log"  # in --ckpt.path
AUTO, PROGRESS = "auto", "progress"
_POLL = 0.5  # seconds
_FROM_WORKER = re.compile(r"^(?:\x1b\[\d+m)*\(\S+ pid=\d+(?:, ip=\S+)?\)(?:\x1b\[\d+m)* ")
_COLOURS = re.compile(r"\x1b\[\d*m")
_OURS = "arlopti_openrlhf: "
_LOGGED = re.compile(r"^(WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \w+\.py:\d+\] ")  # as OpenRLHF's loggers write


def is_wanted(mode: str) -> bool:
    """Return whether a run shows its progress, by `--logger.console` and by where standard output leads."""
    return mode == PROGRESS or (mode == AUTO and sys.stdout.isatty())


class Console:
    """Shows the progress of this process's run from `__enter__` on, until `close`.

    Args:
        log: the file, which goes on where it exists. Only the user can read a new one.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._ended = threading.Event()
        self._bar: tqdm | None = None
        self._shown: Progress | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Console":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, f"\n{datetime.now():%Y-%m-%d %H:%M:%S} process {os.getpid()}\n".encode())
        self._lines = open(self.log, encoding="utf-8", errors="replace")
        self._lines.seek(0, os.SEEK_END)
        sys.stdout.flush()
        sys.stderr.flush()
        self._descriptors = os.dup(1), os.dup(2)
        self._terminal: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        print(f"{_OURS}starting. The output of Ray, vLLM and DeepSpeed: {self.log}", file=self._terminal)
        _buffer_lines(True)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self, last_lines: str = "") -> None:
        """Give standard output and standard error back. A second call does nothing.

        Args:
            last_lines: what the caller says next, for the file.
        """
        if self._ended.is_set():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._ended.set()
        self._thread.join(5)
        os.write(2, f"{last_lines}\n".encode())
        for stream, kept in zip((1, 2), self._descriptors, strict=True):
            os.dup2(kept, stream)
            os.close(kept)
        _buffer_lines(sys.stdout.isatty())

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_POLL)
            for line in self._lines:
                if text := for_the_user(line):
                    self._print(text)
            try:
                found = progress.read() if ray.is_initialized() else Progress()
            except Exception:  # Ray starts or ends
                continue
            if not is_last:
                self._show(found)
        if self._bar:
            self._bar.close()

    def _print(self, text: str) -> None:
        tqdm.write(text, file=self._terminal)

    def _show(self, found: Progress) -> None:
        """Show what is new."""
        if found == self._shown or found.prompts is None:
            return
        before, self._shown = self._shown or Progress(), found
        if not self._terminal.isatty():
            self._show_lines(before, found)
            return
        if self._bar is None:
            self._bar = tqdm(
                total=found.prompts,
                desc="step 0",
                file=self._terminal,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]",
            )
        elif before.last is None and found.last and not found.step:
            self._bar.reset(found.prompts)  # the evaluation before the first step says nothing of how long steps take
        if found.step:
            self._bar.set_description_str(f"step {found.step.number}", refresh=False)
            self._bar.set_postfix_str(_figures(found), refresh=False)
            if not (before.step or self._bar.n) and found.first is None and found.step.number > 1:
                self._bar.initial = self._bar.n = found.step.prompts  # a resumed run
            self._bar.update(found.step.prompts - self._bar.n)
            self._bar.refresh()

    def _show_lines(self, before: Progress, found: Progress) -> None:
        """Show a line for each step, where there is no terminal."""
        if found.step and found.step != before.step:
            self._print(
                f"step {found.step.number}, {found.step.prompts} of {found.prompts} prompts: {_figures(found)}"
            )


def _buffer_lines(whether: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=whether)


def for_the_user(line: str) -> str | None:
    """Return what a line of the output says to the user, without who has printed it; or None."""
    text = _COLOURS.sub("", _FROM_WORKER.sub("", line)).rstrip()
    if text.startswith(_OURS):
        return text
    logged = _LOGGED.match(text)
    return f"{_OURS}{logged[1].lower()}: {text[logged.end() :]}" if logged else None


def _figures(found: Progress) -> str:
    shown = [found.step.figures] if found.step else []
    if found.last and "accuracy" in found.last.metrics:
        shown.append(f"held out {found.last.metrics['accuracy']:.3g}")
    return ", ".join(shown)
