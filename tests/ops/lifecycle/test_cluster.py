"""Ray on one machine: nobody else gets in, and nothing of it is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from arlopti_openrlhf.ops.lifecycle import cluster, temporary

DRIVER = """
import os, sys, tempfile
os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"  # and not the run's 30
sys.argv = ["train", "http://host/?token=abc-secret"]
import psutil
psutil.Process.cmdline = lambda self: sys.argv  # a command line with a secret
import ray
ray._private.utils.psutil.Process.cmdline = psutil.Process.cmdline
from pathlib import Path
from arlopti_openrlhf.ops.lifecycle import cluster
os.umask(0o077)
folder = tempfile.mkdtemp(prefix="arlopti-", dir="/tmp")
cluster.wrap_init(Path(folder), {"SECRET": "abc-secret"})
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)

@ray.remote
def receive():
    from arlopti_openrlhf.ops.lifecycle import credentials
    credentials.receive()
    return os.environ["SECRET"], oct(os.umask(0)), os.environ["VLLM_RPC_BASE_PATH"]

[job] = ray._private.worker.global_worker.gcs_client.get_all_job_info().values()
print(*ray.get(receive.remote()), job.entrypoint, flush=True)
print(ray.get_runtime_context().gcs_address, folder, flush=True)
sys.stdin.read()
"""
STRANGER = """
import ray, sys
ray.init(sys.argv[1])
print("ran", ray.get(ray.remote(lambda: 1).remote()))
"""

pytestmark = pytest.mark.whole_stack


@pytest.fixture(scope="module")
def driver():
    """Return a driver with a cluster of its own, and what it has printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(Path(cluster.__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield process, process.stdout.readline().split(), process.stdout.readline().split()
        process.kill()


def test_it_listens_to_this_machine_alone(driver):
    process, _, (address, _) = driver
    pids = {process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))}
    listening = [c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in pids]
    assert len(listening) >= 5 and set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert address.startswith("127.0.0.1:")


def test_a_process_without_the_token_runs_nothing(driver):
    _, _, (address, _) = driver
    # At 127.0.0.1, as a stranger on this machine would call it, and with the tries of `ray.init` cut short.
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, address], env=environment, capture_output=True, text=True, timeout=120
    )
    assert stranger.returncode != 0 and "ran" not in stranger.stdout
    assert "Authentication" in stranger.stderr


def test_secrets_reach_the_workers_and_neither_files_nor_the_list_of_jobs(driver):
    _, (secret, umask, sockets, *entrypoint), (_, folder) = driver
    assert (secret, umask, entrypoint) == ("abc-secret", "0o77", ["train", "http://host/?token=${SECRET}"])
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert sockets == folder  # vLLM's, which it does not remove
    files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10
    assert not [path for path in files if b"abc-secret" in path.read_bytes()]


def test_nothing_is_left_of_a_killed_run(driver):
    """It comes last: no other test finds a cluster after it."""
    process, _, _ = driver
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 5
    process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_folders_of_ended_runs_are_removed_but_for_the_last_two(tmp_path, monkeypatch):
    """One that runs stays, however old."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    code = (
        "import sys; from arlopti_openrlhf.ops.lifecycle import temporary; print(temporary.make_folder(), flush=True)"
    )
    running = subprocess.Popen([sys.executable, "-c", f"{code}; sys.stdin.read()"], stdin=-1, stdout=-1, text=True)
    kept = [Path(running.stdout.readline().strip())]
    (tmp_path / "arlopti-of-others").mkdir()
    for age in range(4, 0, -1):
        folder = Path(subprocess.run([sys.executable, "-c", code], stdout=-1, text=True).stdout.strip())
        os.utime(folder, (1e9 - age, 1e9 - age))
        kept.append(folder)
    new = temporary.make_folder()
    assert set(tmp_path.iterdir()) == {kept[0], *kept[-2:], new, tmp_path / "arlopti-of-others"}
    running.communicate()
