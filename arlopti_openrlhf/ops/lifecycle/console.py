"""Shows a person how far a run is: one line, with the output of Ray, vLLM, DeepSpeed and OpenRLHF in a file.

The file descriptors of standard output and standard error lead to the file, since C++ writes to them too. The lines
for the user are read back from there: those of this package, warnings of OpenRLHF's and this package's loggers, and
Ray's that it cannot place or keep alive what the run needs.
"""

import os
import re
import sys
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import ray
from tqdm import tqdm

from arlopti_openrlhf.ops.lifecycle import progress
from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.terminal import PREFIX, lenient, one_line, say

LOG = "train.log"  # in --ckpt.path
_POLL = 0.5  # seconds
_END = 1.0  # seconds that the last lines get, which may wait for Ray or for the terminal
_FROM_WORKER = re.compile(r"^\((?:\S+ )?pid=\d+(?:, ip=\S+)?\) ")
_FROM_RAY = re.compile(r"^\((?:raylet|autoscaler)\b.*\b(?:warning|error)\b", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[\d*m")
# What a run waits for at first, and how long the whole start takes a small model on two cores.
_RAY = "waiting for OpenRLHF's imports and for Ray"
_MODELS = "waiting for the models in vLLM and DeepSpeed"
_USUALLY = "usually one to two minutes, and more for large models"
_LOGGED = re.compile(r"^(WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \w+\.py:\d+\] ")  # as OpenRLHF's loggers write


def of_run(run: Any, args: SimpleNamespace) -> "Console | None":
    """Return what shows the progress of a run (`driver.Driver`), if that is wanted.

    Raises:
        SystemExit: the log cannot be written.
    """
    try:
        run.console = Console(Path(args.ckpt.path, LOG)) if is_wanted(args.logger.console) else None
    except OSError as error:
        print(f"arlopti train: error: argument --ckpt.path: {LOG} cannot be written: {error}", file=sys.stderr)
        sys.exit(2)
    return run.console


def is_wanted(mode: str) -> bool:
    """Return whether a run shows its progress, by `--logger.console` and by where its output leads."""
    return mode == "progress" or (mode == "auto" and sys.stdout.isatty() and sys.stderr.isatty())


class Console:
    """Shows the progress of this process's run from `__enter__` on, until `close`.

    Args:
        log: the file. An existing one is appended to, and only the user can read a new one.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._descriptor, f"\n{datetime.now():%Y-%m-%d %H:%M:%S} process {os.getpid()}\n".encode())
        self._lines = open(log, encoding="utf-8", errors="replace")
        self._lines.seek(0, os.SEEK_END)
        self._rest = ""  # of a line that is not written to its end yet
        self._ended = threading.Event()
        self._bar: tqdm | None = None
        self._shown = Progress()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Console":
        sys.stdout.flush()
        sys.stderr.flush()
        self._kept = os.dup(1), os.dup(2)
        self._terminal = lenient(os.dup(1))
        say(f"starting. The output of Ray, vLLM and DeepSpeed: {self.log}", file=self._terminal)
        self._thread.start()
        os.dup2(self._descriptor, 1)
        os.dup2(self._descriptor, 2)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self, last_lines: str = "") -> None:
        """Give standard output and standard error back, whatever has become of the file. A second call does nothing.

        Args:
            last_lines: what the caller says next, for the file.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            self._thread.join(_END)
            with suppress(OSError):
                os.write(self._descriptor, f"{last_lines}\n".encode(errors="replace"))
        finally:
            os.dup2(self._kept[0], 1)
            os.dup2(self._kept[1], 2)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_POLL)
            with suppress(Exception):  # Ray starts or ends: the run continues
                self._show_lines(is_last)
                if not is_last:
                    self._show(progress.read())
        self._close_bar()

    def _show_lines(self, is_last: bool) -> None:
        """Show what the file has new for the user. A line counts once its end is there."""
        text = self._rest + self._lines.read()
        *lines, self._rest = text.split("\n")
        if is_last:
            lines.append(self._rest)
        for line in lines:
            if said := for_the_user(line):
                self._print(said)

    def _show(self, found: Progress) -> None:
        """Show how far the run is."""
        before, self._shown = self._shown, found
        if found.prompts is None:
            self._show_waiting()
            return
        if not self._terminal.isatty():
            if found.step and found.step != before.step:
                share = f"{found.step.prompts} of {found.prompts.total} prompts"
                self._print(f"step {found.step.number}, {share}: {_figures(found)}")
            return
        if self._bar is None or self._bar.total is None:
            self._close_bar()
            self._bar = tqdm(
                total=found.prompts.total,
                initial=found.prompts.at_start,
                desc="step 0",
                file=self._terminal,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar:10}| {elapsed}<{remaining}{postfix}",
            )
        elif before.last is None and found.last and not found.step:
            self._bar.reset(found.prompts.total)  # an evaluation says nothing of how long steps take
        if found.step:
            self._bar.set_description_str(f"step {found.step.number}", refresh=False)
            self._bar.set_postfix_str(_figures(found), refresh=False)
            self._bar.update(found.step.prompts - self._bar.n)
        self._bar.refresh()

    def _show_waiting(self) -> None:
        """Show what the run waits for before it has prompts, and for how long it has waited."""
        if self._bar is None and self._terminal.isatty():
            self._bar = tqdm(file=self._terminal, bar_format=f"{{desc}}: {{elapsed}} ({_USUALLY})", leave=False)
        if self._bar is not None and self._bar.total is None:
            self._bar.set_description_str(_MODELS if ray.is_initialized() else _RAY)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        tqdm.write(one_line(text), file=self._terminal)


def for_the_user(line: str) -> str | None:
    """Return what a line of the output says to the user, without the name of its process, or None."""
    text = _COLOURS.sub("", line).rstrip()
    if _FROM_RAY.match(text):
        return PREFIX + text
    text = _FROM_WORKER.sub("", text)
    if text.startswith(PREFIX):
        return text
    logged = _LOGGED.match(text)
    return f"{PREFIX}{logged[1].lower()}: {text[logged.end() :]}" if logged else None


def _figures(found: Progress) -> str:
    accuracy = found.last.metrics.get("accuracy") if found.last else None
    shown = [] if accuracy is None else [f"held out {accuracy:.3g}"]
    return ", ".join([*shown, found.step.figures] if found.step else shown)
