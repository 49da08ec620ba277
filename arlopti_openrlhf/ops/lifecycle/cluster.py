"""Starts a run's own Ray cluster, which no other user can enter, and marks the run's processes in any cluster."""

import functools
import os
import signal
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from arlopti_openrlhf import interrupts, loopback
from arlopti_openrlhf.ops.lifecycle import credentials, reaper
from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.ray_address import starts_cluster

# Where a cluster of our own keeps its logs and sockets, in the run's folder. Ray makes it readable to everybody.
SESSIONS = "ray"
# Ray would kill the processes that an actor has started before the actor can end them. What is left is the reaper's.
LEAVES_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}


def of_run(run: Any, args: SimpleNamespace) -> None:
    """Give a run (`driver.Driver`) a cluster of its own if it names none, and the workers its secrets."""
    wrap_init(run.name, run.folder, credentials.collect(args.logger.wandb.key, args.reward.remote_url))


def wrap_init(run: str, folder: Path, secrets: dict[str, str]) -> None:
    """Wrap `ray.init` on the driver. A cluster that it starts is ours alone; one that it joins is left as it is.

    The run's processes carry its name (`ops.lifecycle.reaper`). The job's workers get the secrets, by variable. Ray's
    files, which are in the run's folder, and Ray's list of jobs do not.
    """
    init, entrypoint = ray.init, ray_utils.get_entrypoint_name()  # Ray lists the job with the driver's command line
    for name, secret in secrets.items():
        entrypoint = entrypoint.replace(secret, f"${{{name}}}")

    @functools.wraps(init)
    def init_of_run(*args, **kwargs):
        runtime_env = dict(kwargs.get("runtime_env") or {})
        runtime_env["env_vars"] = {reaper.MARKER: run} | LEAVES_CHILDREN | (runtime_env.get("env_vars") or {})
        kwargs["runtime_env"] = runtime_env
        if starts_cluster(args[0] if args else kwargs.get("address")):
            _close_to_others()
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # for sockets, which vLLM would leave in /tmp
            kwargs = {"_temp_dir": str(folder / SESSIONS), "dashboard_host": "127.0.0.1"} | kwargs
        handlers = {signum: signal.getsignal(signum) for signum in interrupts.SIGNALS}
        # A terminal that closes sends SIGHUP to all processes of the run. Those that Ray starts inherit the mask, and
        # live on while the run saves a checkpoint. Here it only waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with replaced_attribute(ray_utils, "get_entrypoint_name", lambda: entrypoint):
                context = init(*args, **kwargs)
            credentials.send(secrets)
            return context
        finally:
            # Ray takes SIGTERM, in Python and in C++: it would print a stack trace and abort.
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    ray.init = init_of_run


def _close_to_others() -> None:
    """Let the cluster that starts next listen to this machine alone, and there only to those that know a secret."""
    # With Ray's clusters of several machines off, its node has the address 127.0.0.1. `_node_ip_address` cannot say
    # so: Ray replaces a local address there by one that others reach. The variable reaches all processes of the node.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    loopback.ask()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    raylet: Any = ray._raylet
    raylet.Config.initialize("")  # Ray has read its variables when it was imported
    raylet.AuthenticationTokenLoader.instance().reset_cache()
