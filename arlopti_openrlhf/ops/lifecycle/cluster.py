"""Starts a run's own Ray cluster, which no other user can enter."""

import functools
import os
import signal
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from arlopti_openrlhf import interrupts
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.lifecycle.parent import SESSIONS
from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.ray_address import starts_cluster

_LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}  # where gloo and vLLM's own group listen


def wrap_init(folder: Path, secrets: dict[str, str]) -> None:
    """Wrap `ray.init` on the driver. A cluster that it starts is ours alone; one that it joins is left as it is.

    The job's workers get the secrets, by variable. Ray's files, which are in the run's folder, and Ray's list of jobs
    do not.
    """
    init, entrypoint = ray.init, ray_utils.get_entrypoint_name()  # Ray lists the job with the driver's command line
    for name, secret in secrets.items():
        entrypoint = entrypoint.replace(secret, f"${{{name}}}")

    @functools.wraps(init)
    def init_of_run(*args, **kwargs):
        if starts_cluster(args[0] if args else kwargs.get("address")):
            _close_to_others()
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # for sockets, which vLLM would leave in /tmp
            kwargs = {"_temp_dir": str(folder / SESSIONS), "dashboard_host": "127.0.0.1"} | kwargs
        handlers = {signum: signal.getsignal(signum) for signum in interrupts.SIGNALS}
        try:
            with replaced_attribute(ray_utils, "get_entrypoint_name", lambda: entrypoint):
                context = init(*args, **kwargs)
            credentials.send(secrets)
            return context
        finally:
            # Ray takes SIGTERM, in Python and in C++: it would print a stack trace and abort.
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    ray.init = init_of_run


def _close_to_others() -> None:
    """Let the cluster that starts next listen to this machine alone, and there only to those that know a secret."""
    # With Ray's clusters of several machines off, its node has the address 127.0.0.1. `_node_ip_address` cannot say
    # so: Ray replaces a local address there by one that others reach. The variable reaches all processes of the node.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    # Ray's agents outlive a killed driver while they look for its control store: a minute, by default.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    raylet: Any = ray._raylet
    raylet.Config.initialize("")  # Ray has read its variables when it was imported
    raylet.AuthenticationTokenLoader.instance().reset_cache()
