"""Runs a training as a child of this process: shows it, asks it to stop, sees how it ends, and ends what is left.

| exit code | what it says |
|---|---|
| 0 | the run is complete |
| 1 | an error, with its traceback |
| 2 | the command line, or what it names, is refused |
| 3, 4 | the run has diverged (`ops.lifecycle.stopping`); it makes no progress |
| 5 | no checkpoint is whole (`ops.checkpoints.saving`) |
| 6 | no step was trained, because dynamic filtering left out every prompt (`ops.lifecycle.stopping`) |
| 129, 130, 143 | SIGHUP, SIGINT, SIGTERM; 128 + another signal that has ended the child |

The child has a session of its own, so a terminal, `timeout` or a supervisor that signals its process group reaches the
parent alone. It dies with the parent. As a subreaper, the parent inherits every orphan of the run.

The two talk over a socket pair that is closed on exec: the parent sends the signal that asks the run to stop, and the
child what it reports (`Child`). Its last words stay in a file in memory. So a parent that is halted blocks nothing.
"""

import ctypes
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from arlopti_openrlhf import interrupts, terminal
from arlopti_openrlhf.ops.lifecycle import progress
from arlopti_openrlhf.ops.lifecycle.console import Console
from arlopti_openrlhf.terminal import PREFIX

SESSIONS = "ray"  # in the folder of the run's temporary files: Ray's logs and sockets
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl
_POLL = 0.5  # seconds
_ONE = 1.0  # seconds in which several signals are one request: `timeout` and a terminal that closes send more than one
_END, _REST = 30.0, 3.0  # seconds that the child gets after its last words, and that what it leaves behind gets
_PAUSE, _LONGEST_PAUSE = 15.0, 600.0  # seconds before the first restart; each is twice the one before
_MENDABLE = (1, 4, *(128 + signum for signum in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)))


class Child:
    """The child's end of what links it to its parent.

    Attributes:
        folder: of the run's temporary files, once the run has begun (`ops.lifecycle.child`).
    """

    folder: Path

    def __init__(self, link: socket.socket, words: int) -> None:
        self._link, self._words = link, words

    def report(self, **what: Any) -> bool:
        """Send a report, and return whether the parent has room for it.

        Args:
            what: `log` and `folder` of the run at its start, a line that is `said` to the user, or how far it is:
                `found` (`progress.read`), `has_ray`, `is_training`.
        """
        with suppress(OSError):
            return self._link.send(json.dumps(what).encode(), socket.MSG_DONTWAIT) > 0
        return False

    def wait_for_request(self) -> int:
        """Return the signal for which the parent asks the run to stop, once it does."""
        return int(self._link.recv(16))

    def say_last(self, code: int, text: str) -> None:
        """Leave the exit code and the last lines for the parent."""
        os.pwrite(self._words, json.dumps([code, text[: 2**16]]).encode(), 0)  # an error may have a whole response


class Parent:
    """Runs a training.

    Args:
        stall_minutes: without progress, after which the run is ended.
        restarts: how often it may be started again.
        how_to_go_on: returns a line on the checkpoint from which the run can be resumed, or nothing.
    """

    def __init__(self, stall_minutes: float, restarts: int, how_to_go_on: Callable[[], str]) -> None:
        self._stall_minutes, self._restarts, self._how_to_go_on = stall_minutes, restarts, how_to_go_on
        self._signals: list[int] = []  # the first signal, and one that ends the run at once
        self._asked_at = 0.0

    def run(self, train: Callable[[Child, bool], None]) -> int:
        """Run the training, and return the exit code.

        Args:
            train: trains in the child. It also gets whether the run has been started again, and has to resume.
        """
        sys.stdout, sys.stderr = terminal.lenient(1), terminal.lenient(2)
        for signum in interrupts.handled():
            signal.signal(signum, self._on_signal)
        _prctl(_SUBREAPER, 1)
        others, restart = interrupts.children(), 0  # those of a shell that this process has replaced
        while True:
            start = _Start(train, restart > 0)
            is_stuck = start.watch(self._signals, 60 * self._stall_minutes)
            start.kill()
            interrupts.end_children(0 if self._signals[1:] else _REST, others)
            code = self._say_last(start, is_stuck)
            may_mend = code in _MENDABLE or (code == 2 and restart)  # the flags were not refused at first
            if not may_mend or self._signals or restart == self._restarts:
                return code
            pause = min(_PAUSE * 2**restart, _LONGEST_PAUSE)
            restart, until = restart + 1, time.monotonic() + pause
            terminal.say(f"status {code}: restart {restart} of {self._restarts} in {pause:g} s", file=sys.stderr)
            while time.monotonic() < until:
                if self._signals:
                    return 128 + self._signals[0]
                time.sleep(_POLL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._signals:
            self._asked_at = time.monotonic()
        # A terminal that closes sends SIGHUP more than once, and the end of a session sends SIGTERM as well.
        elif time.monotonic() - self._asked_at < _ONE or signal.SIGHUP in (signum, self._signals[0]):
            return
        self._signals.append(signum)

    def _say_last(self, start: "_Start", is_stuck: bool) -> int:
        """Say how the run has ended, to the user and in its log, and return the exit code."""
        code, text = self._how_it_ended(start, is_stuck)
        lines, log, folder = [text] if text else [], start.seen.get("log"), start.seen.get("folder")
        if code and text and folder:
            with suppress(OSError):  # a file system that fails has no checkpoint to name
                if (code in _MENDABLE or self._signals) and (line := self._how_to_go_on()):
                    lines.append(PREFIX + line)
            lines += [f"{PREFIX}the run's log: {log}"] if log else []
            if Path(folder, SESSIONS).exists() and not self._signals:
                lines.append(f"{PREFIX}Ray's logs: {Path(folder, SESSIONS)}")
        if lines:
            print("\n".join(lines), file=sys.stderr if code else sys.stdout, flush=True)
        if lines and log:
            with suppress(OSError), open(log, "a", encoding="utf-8", errors="replace") as file:
                print("\n".join(lines), file=file)
        return code

    def _how_it_ended(self, start: "_Start", is_stuck: bool) -> tuple[int, str]:
        """Return the exit code and the cause, which is empty if the child has said it itself."""
        code, text = start.last_words()
        first, *second = self._signals or [0]
        if second:
            return 128 + first, f"{PREFIX}{signal.Signals(second[0]).name} again: the run ends at once."
        if is_stuck:
            limit = f"no progress for {self._stall_minutes:g} minutes (--train.stall_minutes)"
            return 4, f"{PREFIX}run stopped: {progress.place(start.found)}: {limit}"
        if first and code in (None, 1):  # who signals all processes means the run: their deaths follow from it
            stopped = "run stopped: " if "folder" in start.seen else ""
            return 128 + first, f"{PREFIX}{stopped}{signal.Signals(first).name} received"
        if code is not None:
            return code, text
        if start.status < 0:
            return 128 - start.status, f"{PREFIX}run failed: {signal.Signals(-start.status).name} has ended its driver"
        return start.status, ""


class _Start:
    """One start of the training, in a child.

    Attributes:
        seen: what the child has reported, the newest of each kind.
        found: how far the run is.
        status: of the child, negative for a signal.
    """

    def __init__(self, train: Callable[[Child, bool], None], resumes: bool) -> None:
        self.seen: dict[str, Any] = {}
        self.found, self.status, self._has_ended = progress.Progress(), 0, False
        self._console: Console | None = None
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(_POLL)
        self._words = os.memfd_create("last words")
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _leave_the_terminal(parent)
            _exit_after(lambda: train(Child(theirs, self._words), resumes))
        theirs.close()

    def watch(self, signals: list[int], seconds: float) -> bool:
        """Watch the child until it ends or has to be ended, and return whether it is stuck.

        Args:
            signals: those that this process has got. A second one ends the run at once.
            seconds: without progress, after which it is stuck.
        """
        is_asked, ends_at, self._since = False, math.inf, time.monotonic()
        while not self._has_ended and time.monotonic() < ends_at and len(signals) < 2:
            if signals and not is_asked:
                if not self.seen.get("is_training"):
                    break
                is_asked = True
                self._ask_to_stop(signals[0])
            has_report = self._read()
            if self._console:
                self._console.show(self.found, self.seen.get("has_ray", False))
            if ends_at == math.inf and os.fstat(self._words).st_size:  # the child has said its last words
                ends_at = time.monotonic() + _END
            is_late = "folder" in self.seen and time.monotonic() > self._since + seconds
            if is_late and not has_report and ends_at == math.inf:
                return True
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans of the run end too
                    if ended[0] == self._pid:
                        self._has_ended, self.status = True, os.waitstatus_to_exitcode(ended[1])
        return False

    def kill(self) -> None:
        """Kill the child if it lives, and show what it has reported."""
        if not self._has_ended:
            os.kill(self._pid, signal.SIGKILL)
        self._link.settimeout(0)
        while self._read():
            pass
        self._link.close()
        if self._console:
            self._console.close()

    def last_words(self) -> tuple[int | None, str]:
        """Return what the child has said last (`Child.say_last`)."""
        return json.loads(os.pread(self._words, 2**20, 0) or '[null, ""]')

    def _read(self) -> bool:
        """Take up a report if one comes within some time."""
        try:
            report = json.loads(self._link.recv(2**20))
        except TimeoutError:
            return False
        except (OSError, ValueError):  # the child has closed its end
            time.sleep(self._link.gettimeout() or 0)
            return False
        if said := report.pop("said", ""):
            if self._console:
                self._console.print(said)
            return True
        self.seen |= report
        before, self.found = self.found, progress.of(self.seen.get("found", {}))
        if "folder" in report or self.found != before:
            self._since = time.monotonic()
        if report.get("log"):
            self._console = Console(report["log"])
        return True

    def _ask_to_stop(self, signum: int) -> None:
        name = signal.Signals(signum).name
        line = f"{name}: the run saves a checkpoint and ends. A second signal ends it at once."
        if self._console:
            self._console.print(PREFIX + line)
        else:
            terminal.say(line, file=sys.stderr)
        with suppress(OSError):
            self._link.send(str(signum).encode())


def _leave_the_terminal(parent: int) -> None:
    """Give this process, the child, a session of its own and no input, and let it die with its parent."""
    os.setsid()
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for signum in interrupts.handled():  # a signal that is ignored would be ignored by what it starts, too
        signal.signal(signum, lambda signum, frame: None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _exit_after(act: Callable[[], None]) -> NoReturn:
    """End this process, a fork, with the status with which Python would end it."""
    code: Any = 1
    try:
        act()
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
