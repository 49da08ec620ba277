"""Checks whether a Ray cluster runs on this machine that the run is not asked to join."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.finding import Finding

_ANSWER_SECONDS = 1.0


def check(args: SimpleNamespace) -> list[Finding]:
    """Return a finding if `ray start` has left the address of a cluster that answers, and RAY_ADDRESS does not decide.

    Ray would join it, whosever it is.
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
