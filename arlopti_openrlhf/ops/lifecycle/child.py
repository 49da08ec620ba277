"""Tells the parent of a run (`ops.lifecycle.parent`) how far the run is, what it says to the user, and why it ends."""

import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray._private import worker
from ray._private.state import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.lifecycle import console, progress, stopping, temporary
from arlopti_openrlhf.ops.lifecycle.parent import Child
from arlopti_openrlhf.terminal import PREFIX

_POLL = 0.5  # seconds
_LOOK = 10.0  # seconds between two looks at the actors. The second one ends the run, whose own error is better
_LAST_LINES = 2.0  # seconds in which Ray hands on the last lines that the workers have printed
_ACTOR = re.compile(r"class_name: (\S+).*?\bpid: (\d+)", re.DOTALL)
_WANTED = (ActorDiedErrorContext.RAY_KILL, ActorDiedErrorContext.OUT_OF_SCOPE, ActorDiedErrorContext.REF_DELETED)


def of_run(child: Child, args: SimpleNamespace) -> AbstractContextManager[None]:
    """Begin a run in the child, and return a context that ends it, and this process.

    Raises:
        SystemExit: the log cannot be written.
    """
    os.umask(0o077)
    log = _led_away(Path(args.ckpt.path, console.LOG)) if console.is_wanted(args.logger.console) else None
    child.folder = temporary.make_folder()
    child.report(log=str(log or ""), folder=str(child.folder))
    return _Run(child, lambda: progress.closing_text(args, progress.of(progress.read()), log)).ending()


class _Run:
    """A training in the child.

    Args:
        closing: returns what to say once the run is complete.
    """

    def __init__(self, child: Child, closing: Callable[[], str]) -> None:
        self._child, self._closing = child, closing
        self._rest: dict[int, str] = {}  # of a line that is not written to its end yet, by thread
        self._lines: dict[str, str] = {}  # the last one of each worker, by the number of its process
        self._is_ending = False

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Report what goes on, and leave the parent an exit code and the last lines, whatever ends the run."""
        sys.stdout, sys.stderr = terminal.lenient(1, self._tell), terminal.lenient(2, self._tell)
        for act in (self._report, self._obey, self._look_after_actors):
            threading.Thread(target=act, daemon=True).start()
        cause: BaseException | None = None
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            cause = root(error)
            if not isinstance(cause, stopping.RunStopped):
                sys.stdout.flush()
                print(terminal.indented("".join(traceback.format_exception(error)).rstrip()), file=sys.stderr)
        self._is_ending = True
        if ray.is_initialized():
            time.sleep(_LAST_LINES)
        code = cause.exit_code if isinstance(cause, stopping.RunStopped) else int(cause is not None)
        text = last_lines(cause, self._lines) if cause else self._what_came_out()
        self._child.say_last(code, text)
        ray.shutdown()
        if code == 0:
            shutil.rmtree(self._child.folder, ignore_errors=True)
        sys.exit(code)

    def _what_came_out(self) -> str:
        """Return the closing text. If that fails, the run is complete all the same."""
        try:
            return self._closing()
        except Exception as error:
            return f"{PREFIX}the run is complete. Its results cannot be shown: {type(error).__name__}: {error}"

    def _tell(self, text: str) -> None:
        """Report the lines for the user in what this process prints. Ray lets it print what the workers do."""
        thread = threading.get_ident()
        *lines, self._rest[thread] = (self._rest.get(thread, "") + text).split("\n")
        for line in lines:
            if found := console.WORKER.match(line):
                self._lines[found[1]] = line[found.end() :]
            if said := console.for_the_user(line):
                self._child.report(said=said)

    def _report(self) -> None:
        """Report how far the run is."""
        sent: dict[str, Any] = {}
        while True:
            time.sleep(_POLL)
            with suppress(Exception):  # Ray starts or ends
                found = progress.brief(progress.read())
                report = {"found": found, "has_ray": ray.is_initialized(), "is_training": stopping.is_training()}
                if report != sent and self._child.report(**report):
                    sent = report

    def _obey(self) -> None:
        """Hand a request to stop on to the controllers."""
        stopping.request_stop(self._child.wait_for_request())

    def _look_after_actors(self) -> None:
        """End the run some time after an actor has died: no call of Ray's may wait for it."""
        dead: dict[str, BaseException] = {}
        try:
            while True:
                time.sleep(_LOOK)
                before, dead = dead, _dead_actors()
                if self._is_ending:
                    return
                if not stopping.get("saving") and (missed := dead.keys() & before.keys()):
                    break
        except Exception as error:
            terminal.say(f"Ray's table of actors cannot be read, so nobody looks after them: {error!r}")
            return
        self._child.say_last(1, last_lines(dead[min(missed)], self._lines))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def last_lines(cause: BaseException, of_workers: Mapping[str, str]) -> str:
    """Return what to say at the very end: one line, or a few of an error with a long text.

    Args:
        of_workers: the last line of each worker, by the number of its process.
    """
    if isinstance(cause, stopping.RunStopped):
        return f"{PREFIX}run stopped: {terminal.one_line(cause)}"
    lines = [line.rstrip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
    if isinstance(cause, ActorDiedError) and (actor := _ACTOR.search(str(cause))):
        lines = [f"{actor[1]} (pid {actor[2]}) has died", lines[-1]]
        lines += [f"its last line: {of_workers[actor[2]]}"] if actor[2] in of_workers else []
    elif len(lines) > 5:
        lines = [*lines[:2], "...", *lines[-2:]]
    return "\n".join([f"{PREFIX}run failed: {lines[0]}", *(f"  {terminal.one_line(line)}" for line in lines[1:])])


def _dead_actors() -> dict[str, BaseException]:
    """Return why actors of this job have died, by their ids. Those that the run itself has ended are left out."""
    if not ray.is_initialized():
        return {}
    dead: dict[str, BaseException] = {}
    actors = state.actor_table(None, worker.global_worker.current_job_id, "DEAD")
    for name, actor in actors.items():
        cause = actor["DeathCause"]
        if failed := cause.creation_task_failure_context.formatted_exception_string:
            dead[name] = RuntimeError(f"{actor['ActorClassName']} cannot start: {failed}")
        elif cause.WhichOneof("context") != "actor_died_error_context":  # such as Ray's own guard of memory
            text = terminal.one_line(str(cause))
            dead[name] = RuntimeError(f"{actor['ActorClassName']} (pid {actor['Pid']}) has died: {text}")
        elif cause.actor_died_error_context.reason not in _WANTED:
            dead[name] = ActorDiedError(cause.actor_died_error_context)
    return dead


def _led_away(log: Path) -> Path:
    """Let the output of this process, and of those that it starts, go to a file that only the user can read.

    Raises:
        SystemExit: it cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, f"\n{datetime.now():%Y-%m-%d %H:%M:%S} process {os.getpid()}\n".encode())
    except OSError as error:
        print(f"arlopti train: error: argument --ckpt.path: {log.name} cannot be written: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return log


def root(error: BaseException) -> BaseException:
    """Return what was raised first, behind the errors in which Ray wraps it on its way from actor to actor."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
