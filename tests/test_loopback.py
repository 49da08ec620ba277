"""A process group of one machine listens to that machine only."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, socket, sys
import psutil
from torch import distributed as dist
from arlopti_openrlhf import loopback

if sys.argv[1] == "asked":
    loopback.ask()
loopback.keep()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo")  # as DeepSpeed
other = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1))  # as vLLM and the weight sync do
group = dist.new_group([0])
dist.barrier(group)
for connection in psutil.Process().net_connections("tcp"):
    if connection.status == psutil.CONN_LISTEN:
        print(connection.laddr.ip)
"""


@pytest.mark.parametrize("how", ["asked", "not asked"])
def test_a_store_at_the_loopback_address_listens_there_if_asked(how):
    """PyTorch itself listens on all interfaces."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=240, check=True
    )
    addresses = set(done.stdout.split())
    assert addresses == {"127.0.0.1"} if how == "asked" else addresses & {"::", "0.0.0.0"}
