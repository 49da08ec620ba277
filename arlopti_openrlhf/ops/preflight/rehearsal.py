"""Runs checks in a child process that calls OpenRLHF's own functions, as the run will. What raises there is found.

The child keeps the caller's process as it was: no import is made in it, no thread, no handler. It is offline, so what
is not on this machine is not downloaded. A crash or a hang of foreign code ends the child alone.
"""

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.finding import Answer, Check, Finding

_COMMAND = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(int(sys.argv[1]))"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}  # of transformers and `datasets`
_SECONDS = 600.0  # for one check


def run(checks: Sequence[Check], args: SimpleNamespace) -> Iterator[Answer]:
    """Yield what the checks answer, each of which can be pickled by its name. What they print is lost."""
    ours, theirs = Pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(theirs.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for this process, which ends the whole group
        )
        theirs.close()
        try:
            ours.send((checks, args))
            for _ in checks:
                if not ours.poll(_SECONDS):
                    yield _failed(f"no answer after {_SECONDS:g} s")
                    return
                yield from ours.recv()
        except (EOFError, OSError):
            status = process.wait()
            output.seek(0)
            last = [line.strip() for line in output if line.strip()][-1:]
            yield _failed(": ".join([f"its process ended with status {status}", *last]))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(check: Check, args: SimpleNamespace) -> Iterator[Answer]:
    """Yield what a check answers. An error in the check itself is a warning."""
    try:
        yield from check(args)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        yield _failed(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


def _failed(cause: str) -> Finding:
    remedy = "the run may end at what it would have found; please report it"
    return Finding("", "", f"a check failed: {cause}", remedy, is_fatal=False)


def main(descriptor: int) -> None:
    """Answer the checks that come over a connection, and end."""
    outside = dict(os.environ)
    os.environ.update(_OFFLINE)
    import datasets  # noqa: F401  It and transformers read now that they are offline. A reward of the user's need not be

    os.environ.clear()
    os.environ.update(outside)
    from arlopti_openrlhf import cpu

    cpu.enable()  # before OpenRLHF is imported
    connection = Connection(descriptor)
    checks, args = connection.recv()
    for check in checks:
        connection.send(list(answers(check, args)))
    os._exit(0)  # without a wait for threads of foreign code
