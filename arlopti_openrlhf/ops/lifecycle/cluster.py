"""Starts a run's own Ray cluster, which no other user can enter."""

import fcntl
import functools
import os
import shutil
import signal
import tempfile
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from arlopti_openrlhf import interrupts
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.ray_address import starts_cluster

# Where a cluster of our own keeps its logs and sockets, in the run's folder. Ray makes it readable to everybody.
SESSIONS = "ray"
_PREFIX, _LOCK, _KEPT = "arlopti-", "run.lock", 2
_LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}  # where gloo and vLLM's own group listen


def of_run(run: Any, args: SimpleNamespace) -> None:
    """Give a run (`driver.Driver`) a cluster of its own if it names none, and the workers its secrets."""
    os.umask(0o077)
    run.folder = make_folder()
    wrap_init(run.folder, credentials.collect(args.logger.wandb.key, args.reward.remote_url))


def make_folder() -> Path:
    """Return a new folder for a run's temporary files, which only this user can enter. Remove those of older runs.

    A run holds a lock in its folder until its process ends. The last two folders that nobody holds stay.
    """
    place = os.environ.get("RAY_TMPDIR", "/tmp")  # sockets: short paths
    ended = [folder for folder in Path(place).glob(f"{_PREFIX}*") if _has_ended(folder)]
    for folder in sorted(ended, key=lambda folder: folder.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    fcntl.flock(os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    return folder


def _has_ended(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        with open(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # it runs, or is none of ours
        return False


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
    # Ray's agents outlive a killed driver while they look for its control store: a minute, by default.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    raylet: Any = ray._raylet
    raylet.Config.initialize("")  # Ray has read its variables when it was imported
    raylet.AuthenticationTokenLoader.instance().reset_cache()
