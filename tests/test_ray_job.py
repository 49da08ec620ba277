"""A training is submitted to a Ray cluster of two nodes as the docs say, with one rank and one engine on each."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(sum(map(ord, query)) % 7) - 3 for query in queries]}
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@pytest.fixture
def cluster(tmp_path) -> Iterator[str]:
    """Start two raylets with a logical GPU each, which stand for two nodes, and yield the address for jobs."""
    port, dashboard = free_ports(2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    # Ray's own folder: a path with a socket in it may have 107 characters.
    folder = Path(f"/tmp/ray-job-test-{os.getpid()}")
    head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    nodes = []
    try:
        for place in (head, [f"--address=127.0.0.1:{port}"]):
            command = ["ray", "start", *place, "--num-gpus=1", "--num-cpus=6", "--block", "--disable-usage-stats"]
            log = open(tmp_path / f"node{len(nodes)}.log", "w")
            nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            wait_for_nodes(f"http://127.0.0.1:{dashboard}", len(nodes))
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        for node in reversed(nodes):
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(60)
            node.kill()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def ask(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]["result"]


def wait_for_nodes(address: str, count: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if len([node for node in ask(f"{address}/api/v0/nodes") if node["state"] == "ALIVE"]) == count:
                return
        except OSError:
            pass
        time.sleep(1)
    raise AssertionError(f"{count} nodes are not there after two minutes")


def submit(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    script = ["bash", "examples/scripts/ray_job.sh", *command]
    return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


def test_a_job_on_two_nodes(cluster, tiny_model, tiny_data, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    training = f"""
        python -m arlopti_openrlhf.cli.train_ppo_ray --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
        --actor.num_nodes 2 --actor.num_gpus_per_node 1 --ref.num_nodes 2 --ref.num_gpus_per_node 1
        --vllm.num_engines 2 --train.colocate_all
        --actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples 16
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
        --reward.remote_url {reward} --algo.advantage.estimator group_norm --algo.kl.init_coef 0.001
        --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4
        --rollout.max_new_tokens 16 --train.batch_size 16 --train.micro_batch_size 4
        --vllm.enforce_eager --vllm.sync_backend gloo --ckpt.output_dir {tmp_path}/final --ckpt.path {tmp_path}/ckpt
    """.split()
    environment = {**os.environ, "ADDRESS": cluster, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("PYTHONPATH", "ARLOPTI_ANNOUNCED", "ARLOPTI_ENABLED"):
        environment.pop(name, None)
    job = submit(training, environment)
    until = time.monotonic() + 120
    while "No available agent to submit job" in job.stderr and time.monotonic() < until:  # Ray has just started
        time.sleep(5)
        job = submit(training, environment)
    output = job.stdout + job.stderr
    assert job.returncode == 0, output[-6000:]
    assert (tmp_path / "final" / "model.safetensors").exists() and "Global step 2: " in output
    actors = ask(f"{cluster}/api/v0/actors?detail=true&limit=1000")
    for name in ("PolicyModelActor", "RolloutRayActor"):
        nodes = [actor["node_id"] for actor in actors if actor["class_name"] == name]
        assert len(nodes) == 2 == len(set(nodes)), (name, nodes)
