"""Knows whether a run starts a Ray cluster, and checks the one that it would join."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

from arlopti_openrlhf.ops.preflight.finding import Finding

_ANSWER_SECONDS = 3.0


def starts_cluster(address: str | None = None) -> bool:
    """Return whether `ray.init(address)` of a run starts a cluster here. It joins one only where one is named.

    What `ray start` has left does not count, because `check` refuses the run before.
    """
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    return address in (None, "local")


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse a cluster that RAY_ADDRESS names and that does not answer.

    Without RAY_ADDRESS, refuse to start where a cluster already runs. `ray.init()` would silently join it.
    """
    named = os.environ.get("RAY_ADDRESS")
    address = named or _started_here()
    if address in ("", "auto", "local"):
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or 10001), _ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        if named:  # and not one of `ray start` that has ended
            remedy = "start the cluster, correct the address, or unset RAY_ADDRESS to run on this machine alone"
            yield Finding("RAY_ADDRESS", address, f"no Ray cluster answers there ({error})", remedy)
        return
    if not named:
        problem = f"a Ray cluster runs on this machine, at {address}"
        remedy = f"RAY_ADDRESS={address} joins it, RAY_ADDRESS=local starts one for this run alone"
        yield Finding("", "", problem, remedy)


def _started_here() -> str:
    """Return the address of the cluster that `ray start` has started on this machine, or ""."""
    from ray._common.utils import get_ray_address_file  # the import of Ray takes half a second

    file = Path(get_ray_address_file(None))
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
