"""Tells whether `ray.init` starts a cluster."""

import os


def starts_cluster(address: str | None = None, started_here: str | None = None) -> bool:
    """Return whether `ray.init(address)` starts a cluster, and joins none.

    Args:
        address: None and "auto" leave it to RAY_ADDRESS.
        started_here: the address that `ray start` has left on this machine. It does not count for a run, whose
            pre-flight refuses such a cluster, and whose own folder for Ray's files then hides the address.
    """
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address or started_here
    return address in (None, "local")
