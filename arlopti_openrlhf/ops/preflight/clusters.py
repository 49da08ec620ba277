"""Knows whether a run starts a Ray cluster, and checks whether one runs here that it is not asked to join."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.finding import Finding

_ANSWER_SECONDS = 1.0


def starts_cluster(address: str | None = None) -> bool:
    """Return whether `ray.init(address)` of a run starts a cluster here. It joins one only where one is named.

    What `ray start` has left does not count, because `check` refuses the run before.
    """
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    return address in (None, "local")


def check(args: SimpleNamespace) -> list[Finding]:
    """Refuse to start if a Ray cluster already runs here and RAY_ADDRESS is unset.

    `ray.init()` would silently join it.
    """
    from ray._common.utils import get_ray_address_file  # the import of Ray takes half a second

    file = Path(get_ray_address_file(None))
    if os.environ.get("RAY_ADDRESS") or not file.is_file():
        return []
    address = file.read_text(encoding="utf-8").strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, ValueError):  # it has ended
        return []
    problem = f"a Ray cluster runs on this machine, at {address}"
    remedy = f"RAY_ADDRESS={address} joins it, RAY_ADDRESS=local starts one for this run alone"
    return [Finding("", "", problem, remedy)]
