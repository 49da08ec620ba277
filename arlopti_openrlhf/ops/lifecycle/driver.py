"""Ends a run as its user expects: a checkpoint before it obeys a signal, one line with the cause, an exit code.

| exit code | what it says |
|---|---|
| 0 | the run is complete |
| 1 | an error, with its traceback |
| 2 | the command line, or what it names, is refused |
| 3, 4 | the run has diverged; it makes no progress (`ops.lifecycle.stopping`) |
| 5 | no checkpoint is whole (`ops.checkpoints.saving`) |
| 6 | no step was trained, because dynamic filtering left out every prompt (`ops.lifecycle.stopping`) |
| 129, 130, 143 | SIGHUP, SIGINT, SIGTERM |
"""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import IO, NoReturn

import ray
from ray.exceptions import RayTaskError

from arlopti_openrlhf import interrupts, terminal
from arlopti_openrlhf.ops.lifecycle import cluster, progress, stopping
from arlopti_openrlhf.ops.lifecycle.console import Console
from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.terminal import PREFIX

# Interrupts a wait of the main thread. Nothing else sends it, and a process without a handler ignores it. Python calls
# the handlers of signals that come together in the order of their numbers, so those of the user come first.
_WAKE = signal.SIGURG
_ANSWER = 5.0  # seconds that Ray gets to say whether the run trains
_EXIT = 3.0  # seconds that Python gets to end
_LAST_LINES = 2.0  # seconds in which Ray hands on the last lines that the workers have printed
_SHUTDOWN = 20.0  # seconds that Ray gets to end its processes; the watcher ends those that are left


class Driver:
    """Looks after a run from outside. There is one in a process, in its main thread.

    Args:
        console: shows the run. None where standard output gets everything.
        closing: returns what to say once the run is complete, from what it has reported.

    Attributes:
        folder: of the run's temporary files, once there is one (`cluster.of_run`). A complete run leaves none.
    """

    def __init__(self, console: Console | None = None, closing: Callable[[Progress], str] = lambda found: "") -> None:
        self.console, self.closing = console, closing
        self.folder: Path | None = None
        self._asked: int | None = None  # the first signal
        self._cause: BaseException | None = None  # what `end` was called with
        self._is_ending = False  # the main thread ends the run, and needs no waking
        self._has_said_last = threading.Event()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Answer signals while the context lasts, and turn what is raised in it into an exit code and its cause.

        Raises:
            SystemExit: the context has raised anything.
        """
        before = {signum: signal.signal(signum, self._on_signal) for signum in interrupts.handled()}
        before[_WAKE] = signal.signal(_WAKE, self._on_wake)
        try:
            yield
            self._is_ending = True
            text = self._what_came_out()
            if ray.is_initialized():
                time.sleep(_LAST_LINES)
            self._shut_down(0, text, sys.stdout)
        except SystemExit:
            raise
        except BaseException as error:  # KeyboardInterrupt too, by which `end` wakes this thread
            self._fail(error)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def end(self, cause: BaseException) -> None:
        """End the run with `cause`, from any thread, whatever the main thread waits for. A second end is none."""
        self._cause = self._cause or cause
        if not self._is_ending:
            _after(2 * _SHUTDOWN, self._give_up)
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def _on_wake(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_ending:
            self._is_ending = True
            raise KeyboardInterrupt  # Ray lets no other exception out of its waits

    def _give_up(self) -> None:
        """End this process, whose main thread could not be woken."""
        cause = self._cause_of(KeyboardInterrupt())
        self._leave(_exit_code(cause), last_lines(cause))

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return why the run ends, from what has reached the main thread."""
        cause = self._cause or root(error)
        # Who signals all processes means the driver. The deaths of the others follow from it, while a controller that
        # stops the run, as it does when asked to, has its own cause, and so has the watch when no checkpoint comes.
        if self._asked and not isinstance(cause, stopping.RunStopped):
            return stopping.Interrupted(self._asked)
        return cause

    def _fail(self, error: BaseException) -> NoReturn:
        self._is_ending = True
        cause = self._cause_of(error)
        if not isinstance(cause, stopping.RunStopped):
            _print(terminal.indented("".join(traceback.format_exception(self._cause or error)).rstrip()))
        said = [last_lines(cause)]
        said += [f"{PREFIX}the run's log: {self.console.log}"] if self.console else []
        if self.folder and (self.folder / cluster.SESSIONS).exists() and not isinstance(cause, stopping.Interrupted):
            said.append(f"{PREFIX}Ray's logs: {self.folder / cluster.SESSIONS}")
        if isinstance(cause, stopping.Interrupted) and ray.is_initialized():
            time.sleep(_LAST_LINES)  # the controller closes its trackers, which say what they have lost
        self._shut_down(_exit_code(cause), "\n".join(said))
        sys.exit(_exit_code(cause))

    def _what_came_out(self) -> str:
        """Return the closing text. If that fails, the run is complete all the same."""
        try:
            return self.closing(progress.read())
        except Exception as error:
            return f"{PREFIX}the run is complete. Its results cannot be shown: {type(error).__name__}: {error}"

    def _shut_down(self, code: int, text: str, file: IO[str] | None = None) -> None:
        """End Ray, whose workers print until then, and say the last lines. Nothing else may hold up the process."""
        in_time = _after(_SHUTDOWN, lambda: self._leave(code, text, file))
        stopping.disconnect()
        if self.folder and code == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        in_time.set()
        _after(_EXIT, lambda: os._exit(code))
        self._say_last(text, file)

    def _leave(self, code: int, text: str, file: IO[str] | None = None) -> NoReturn:
        """Say the last lines and end this process, even in the middle of Ray's shutdown."""
        _after(_EXIT, lambda: os._exit(code))
        self._say_last(text, file)
        os._exit(code)

    def _say_last(self, text: str, file: IO[str] | None = None) -> None:
        """Say how the run has ended, on standard error unless a file is given, once."""
        if self._has_said_last.is_set():
            return
        self._has_said_last.set()
        if self.console:
            self.console.close(text)
        if text:
            _print(text, file)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_ending:
            return  # it takes _SHUTDOWN at most
        if not self._asked:
            self._asked = signum
            # Not here: the main thread may be inside a call of Ray.
            threading.Thread(target=self._ask_to_stop, args=(signum,), daemon=True).start()
        elif signal.SIGHUP not in (signum, self._asked):
            # A terminal that closes sends SIGHUP more than once, and the end of a session sends SIGTERM as well.
            self._leave(128 + signum, f"{PREFIX}{signal.Signals(signum).name} again: the run ends at once.")

    def _ask_to_stop(self, signum: int) -> None:
        name = signal.Signals(signum).name
        # Ray may have got the signal too, as it does at a time limit, and then does not answer.
        answered = _after(_ANSWER, lambda: self.end(stopping.Interrupted(signum)))
        is_training = stopping.is_training()
        answered.set()
        if is_training:
            stopping.request_stop(signum)
            terminal.say(
                f"{name}: the run saves a checkpoint and ends. A second signal ends it at once.", file=sys.stderr
            )
        else:
            self.end(stopping.Interrupted(signum))


def of_run(run: Driver, args: SimpleNamespace) -> AbstractContextManager[None]:
    """Let a run end as its user expects. No write to its output fails."""
    sys.stdout, sys.stderr = terminal.lenient(1), terminal.lenient(2)
    return run.ending()


def root(error: BaseException) -> BaseException:
    """Return what was raised first, behind the errors in which Ray wraps it on its way from actor to actor."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def last_lines(cause: BaseException) -> str:
    """Return what to say at the very end: one line, or a few of an error with a long text."""
    if isinstance(cause, stopping.RunStopped):
        return f"{PREFIX}run stopped: {terminal.one_line(cause)}"
    lines = [line.rstrip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
    if len(lines) > 5:
        lines = [*lines[:2], "...", *lines[-2:]]
    return "\n".join([f"{PREFIX}run failed: {lines[0]}", *map(terminal.indented, lines[1:])])


def _exit_code(cause: BaseException) -> int:
    return cause.exit_code if isinstance(cause, stopping.RunStopped) else 1


def _print(text: str, file: IO[str] | None = None) -> None:
    sys.stdout.flush()
    print(text, file=file or sys.stderr, flush=True)


def _after(seconds: float, act: Callable[[], None]) -> threading.Event:
    """Act after so many seconds, in a thread, unless the event that it returns is set by then."""
    is_off = threading.Event()

    def wait() -> None:
        if not is_off.wait(seconds):
            act()

    threading.Thread(target=wait, daemon=True).start()
    return is_off
