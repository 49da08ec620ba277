"""Keeps what a run on one machine listens on from other machines.

A process group begins with a store, in which its members find each other. PyTorch's store listens on every interface,
even if the members look for it at 127.0.0.1, and asks nobody for a secret.
"""

import importlib
import ipaddress
import os
import socket
from typing import Any

from torch.distributed import TCPStore

_ASKED = "ARLOPTI_LOOPBACK"
# Where gloo's connections and vLLM's own group listen, unless the user has set it.
_VARIABLES = {_ASKED: "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def ask() -> None:
    """Ask the processes that this one will start to listen to this machine only."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def keep() -> None:
    """Let the stores of this process that get a loopback address listen there only, if that was asked. Idempotent."""
    if os.environ.get(_ASKED):
        # By its name, because `torch.distributed` has a function of that name.
        module: Any = importlib.import_module("torch.distributed.rendezvous")
        module.TCPStore = _store


def _store(host_name: str, port: int, is_master: bool = False, **kwargs: Any) -> TCPStore:
    if is_master and _is_loopback(host_name):
        # PyTorch takes no address to listen at, but a socket that listens, which it closes.
        kwargs["master_listen_fd"] = socket.create_server((host_name, port), backlog=socket.SOMAXCONN).detach()
    return TCPStore(host_name=host_name, port=port, is_master=is_master, **kwargs)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
