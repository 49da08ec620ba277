"""Keeps what vLLM says while it starts and works."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from arlopti_openrlhf.terminal import lenient


@contextmanager
def quiet() -> Iterator[None]:
    """Keep vLLM's log in a file while the context lasts. If it fails, standard error gets the log.

    The file descriptors of standard output and standard error lead there, since C++ and vLLM's engine, which is a
    process of its own, write to them too. What Python prints here is shown.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.__stdout__")  # vLLM's logger counts as vLLM
    sys.stdout.flush()
    sys.stderr.flush()
    descriptors, streams = (os.dup(1), os.dup(2)), (sys.stdout, sys.stderr)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as kept:
        try:
            sys.stdout, sys.stderr = map(lenient, descriptors)
            for number in (1, 2):
                os.dup2(kept.fileno(), number)
            yield
        except Exception:
            kept.seek(0)
            print(kept.read(), file=sys.stderr)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = streams
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
