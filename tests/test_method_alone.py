"""`--ops off` and `install`: OpenRLHF's own run, and the method in it, with nothing else."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from openrlhf.utils import config  # noqa: F401
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.upstream import find_source

pytestmark = pytest.mark.long  # `make test` compares updates (tests/update/test_trainer.py)

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
# OpenRLHF draws the order of the prompts from a generator that it never seeds, so not even two runs of it are equal.
SEED = """
import sys
if any("default_worker.py" in word for word in sys.orig_argv):
    import torch
    torch.manual_seed(5)
"""
CPU = "from arlopti_openrlhf import cpu; cpu.enable()"
INSTALL = """from arlopti_openrlhf.launcher import install
install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"])"""


class Run:
    """A run that has ended. vLLM gets one request at a time, so nothing depends on which comes first."""

    def __init__(self, folder: Path, command: list[str], model: Path, data: Path, flags: str = "") -> None:
        folder.mkdir()
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        (folder / "sitecustomize.py").write_text(SEED, encoding="utf-8")
        flags = f"""
            --actor.model_name_or_path {model} --data.prompt_dataset {data} --data.max_samples 6
            --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
            --reward.remote_url {folder}/reward.py --rollout.max_new_tokens 12
            --rollout.batch_size 1 --rollout.n_samples_per_prompt 1 --rollout.micro_batch_size 1
            --train.batch_size 1 --train.micro_batch_size 1 --vllm.num_engines 1 --train.colocate_all
            --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1
            --vllm.enforce_eager --vllm.sync_backend gloo
            --algo.advantage.estimator reinforce --algo.advantage.gamma 0.9
            --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
            --actor.adam.lr 1e-3 --ckpt.output_dir {folder}/final --ckpt.path {folder}/ckpt
            --logger.tensorboard_dir {folder}/tensorboard --logger.wandb.run_name run {flags}"""
        environment = {**os.environ, "SEEN": str(folder / "seen"), "PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "0"}
        environment["PYTHONHASHSEED"] = "0"  # OpenRLHF prints metrics in the order of a set
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
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
        # Lines without numbers, this run's paths, and progress bars.
        plain = re.sub(r"\x1b\[\d*[mA]|/tmp/vllm_dist_\w+", "", self.log).replace(str(folder), "FOLDER")
        lines = {re.sub(r"[\d.]+(e-\d+)?", "N", line).strip() for line in re.split(r"[\r\n]+", plain)}
        self.lines = {line for line in lines if not re.search(r"%\||examples/s|^\([\w ]+pid=N\)$", line)}


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
def run(script, tiny_model, tiny_data, tmp_path_factory):
    """Return run(name), which is made once: OpenRLHF's own run, or one with the same flags and more."""
    folder = tmp_path_factory.mktemp("runs")
    ours = ["-m", "arlopti_openrlhf.cli.train_ppo_ray", "--ops", "off"]
    commands = {
        "stock": script(CPU),
        "--ops off": ours,
        "--ops off with the methods": [*ours, "--algo.ar.alpha", "0.3", "--algo.lopti.eta", "0.5"],
        "install": script(INSTALL),
    }
    return functools.cache(lambda name: Run(folder / name.replace(" ", "_"), commands[name], tiny_model, tiny_data))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_without_a_method_the_run_is_openrlhfs_bit_for_bit(run):
    """The prompts' order, the answers, the weights, the metrics and the printed lines."""
    stock, ours = run("stock"), run("--ops off")
    assert len(stock.answers) == len(set(stock.answers)) == 6
    assert ours.answers == stock.answers and same(ours.weights, stock.weights) and ours.metrics == stock.metrics
    assert len(stock.lines) > 50 and ours.lines ^ stock.lines == set()


def test_with_methods_a_launcher_of_ones_own_trains_as_the_command_does(run):
    stock, by_flags, by_lines = run("stock"), run("--ops off with the methods"), run("install")
    assert by_flags.answers[0] == stock.answers[0] and not same(by_flags.weights, stock.weights)
    assert by_lines.answers == by_flags.answers and same(by_lines.weights, by_flags.weights)
    assert by_lines.metrics == by_flags.metrics
    assert {name for name in by_flags.metrics if "lopti/low/" in name} and "train/ar/mean_weight" in by_flags.metrics
