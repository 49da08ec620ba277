"""`--ops off` and `install`: OpenRLHF's own run, and the method in it, with nothing else."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from openrlhf.utils import config  # noqa: F401
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.upstream import find_source

pytestmark = pytest.mark.whole_stack

# What the model answered, in the order of the questions, with a reward that differs between answers.
REWARD = """
import json, os
def reward_func(queries, prompts, labels, **kwargs):
    import torch
    with open(os.environ["SEEN"], "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(query) + "\\n" for query in queries))
    rewards = torch.tensor([float(sum(map(ord, query)) % 7) - 3 for query in queries])
    return {"rewards": rewards, "scores": (rewards > 0).float(), "extra_logs": {}}
"""
CPU = "from arlopti_openrlhf import cpu; cpu.enable()"
INSTALL = """from arlopti_openrlhf.launcher import install
install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"])"""


class Run:
    """A run that has ended. One prompt at a time is sampled and trained, so nothing depends on who is faster."""

    def __init__(self, folder: Path, command: list[str], model: Path, data: Path, flags: str = "") -> None:
        folder.mkdir()
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        flags = f"""
            --actor.model_name_or_path {model} --data.prompt_dataset {data} --data.max_samples 3
            --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
            --reward.remote_url {folder}/reward.py --rollout.max_new_tokens 12
            --rollout.batch_size 1 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4
            --train.batch_size 4 --train.micro_batch_size 2 --vllm.num_engines 1 --train.colocate_all
            --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1
            --vllm.enforce_eager --vllm.sync_backend gloo --algo.advantage.estimator group_norm
            --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
            --actor.adam.lr 1e-3 --ckpt.output_dir {folder}/final --ckpt.path {folder}/ckpt
            --logger.tensorboard_dir {folder}/tensorboard --logger.wandb.run_name run {flags}"""
        environment = {**os.environ, "SEEN": str(folder / "seen"), "PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "0"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process less to start
        for name in ("ARLOPTI_ANNOUNCED", "ARLOPTI_ENABLED"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, *command, *flags.split()], env=environment, capture_output=True, text=True, timeout=600
        )
        self.log = done.stdout + done.stderr
        assert done.returncode == 0, self.log[-6000:]
        self.answers = [json.loads(line) for line in (folder / "seen").read_text("utf-8").splitlines()]
        self.weights = load_file(folder / "final" / "model.safetensors")
        events = EventAccumulator(str(folder / "tensorboard" / "run"), size_guidance={"scalars": 0})
        events.Reload()
        names = [name for name in events.Tags()["scalars"] if "timing/" not in name]
        self.metrics = {name: [event.value for event in events.Scalars(name)] for name in names}
        # Lines without the numbers and paths that differ from run to run.
        plain = re.sub(r"\x1b\[\d*m", "", self.log).replace(str(folder), "FOLDER")
        self.lines = Counter(re.sub(r"[\d.]+(e-\d+)?", "N", line) for line in re.split(r"[\r\n]+", plain))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return script(first lines): OpenRLHF's own training script with some lines before its first."""
    source = find_source("openrlhf.cli.train_ppo_ray").read_text("utf-8")

    def write(lines: str) -> list[str]:
        path = tmp_path_factory.mktemp("script") / "train_ppo_ray.py"
        path.write_text(f"{lines}\n{source}", encoding="utf-8")
        return [str(path)]

    return write


@pytest.fixture(scope="module")
def alone(script, tiny_model, tiny_data, tmp_path_factory):
    """Return runs, by name: OpenRLHF's own, and others with the same flags."""
    folder = tmp_path_factory.mktemp("runs")
    ours = ["-m", "arlopti_openrlhf.cli.train_ppo_ray", "--ops", "off"]
    commands = {
        "stock": script(CPU),
        "--ops off": ours,
        "--ops off with the methods": [*ours, "--algo.ar.alpha", "0.3", "--algo.lopti.eta", "0.5"],
        "install": script(INSTALL),
    }
    return {
        name: Run(folder / name.replace(" ", "_"), command, tiny_model, tiny_data)
        for name, command in commands.items()
    }


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_without_a_method_the_run_is_openrlhfs_bit_for_bit(alone):
    stock, ours = alone["stock"], alone["--ops off"]
    assert len(stock.answers) == 12 and len(set(stock.answers)) > 3
    assert ours.answers == stock.answers and same(ours.weights, stock.weights) and ours.metrics == stock.metrics
    print(ours.lines - stock.lines, stock.lines - ours.lines)


def test_with_methods_the_two_ways_train_alike_and_the_first_answers_are_openrlhfs(alone):
    stock, by_flags, by_lines = alone["stock"], alone["--ops off with the methods"], alone["install"]
    assert by_flags.answers[:4] == stock.answers[:4] and not same(by_flags.weights, stock.weights)
    assert by_lines.answers == by_flags.answers and same(by_lines.weights, by_flags.weights)
    assert by_lines.metrics == by_flags.metrics
    assert {name for name in by_flags.metrics if "lopti/low/" in name} and "train/ar/mean_weight" in by_flags.metrics
