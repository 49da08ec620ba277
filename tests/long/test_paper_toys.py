"""One toy of each kind of run in docs/reproduce.md, on a CPU: the script trains, evaluate and analyze read the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import prepare_data
from arlopti_openrlhf.lab.data import tiny_policy

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.whole_stack, pytest.mark.timeout(1200)]
KINDS = {
    "GRPO": {"METHOD": "none"},
    "REINFORCE++": {"METHOD": "both", "ALGO": "reinforce++"},
}
# Two steps of 8 puzzles, each with a checkpoint and an evaluation.
FLAGS = """
    --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --rollout.batch_size 8
    --train.batch_size 32 --train.micro_batch_size 16 --train.num_episodes 1 --rollout.max_new_tokens 64
    --data.max_len 512 --eval.steps 1 --ckpt.save_steps 1
    --ds.attn_implementation sdpa --vllm.enforce_eager --vllm.sync_backend gloo
""".split()
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "SLEEP": "0",
    "LIGER": "0",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    """Return a folder with a policy and puzzles."""
    folder = tmp_path_factory.mktemp("toys")
    tiny_policy.make_policy(folder / "policy", people=(2, 3), steps=40)
    size = "--generate --people 2 3 --train 8 --test 2 --prompt-format text --out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data", *size.split(), str(folder / "kk")])
        prepare_data.main()
    return folder


def run(*command: str | Path, **variables: str) -> str:
    """Return what a command prints, which has to succeed."""
    environment = os.environ | ENVIRONMENT | variables
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-6000:]
    return done.stdout


def train(kind: str, folder: Path) -> Path:
    """Return the folder of a run, which is trained unless it is there."""
    out = folder / kind
    if not (out / kind / "config.json").exists():
        own = {"MODEL": str(folder / "policy"), "OUT": str(out), "DATA": str(folder / "kk/train.jsonl")}
        own["EVAL_DATA"] = str(folder / "kk/test.jsonl")
        run("bash", "examples/scripts/train_kk.sh", *FLAGS, **own, **KINDS[kind])
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains(kind, folder):
    out = train(kind, folder)
    assert (out / kind / "config.json").exists() and (out / "checkpoints/global_step2_hf/config.json").exists()


def test_its_last_checkpoints_are_evaluated(folder, tmp_path):
    evaluate = [sys.executable, "-m", "arlopti_openrlhf", "evaluate", "--max-new-tokens=64", "--out", tmp_path]
    ways = ["--sampling", "*:n=1,t=0", "--sampling", "kk_*:n=1,t=0", "--sampling", "kk_*:n=1,t=1"]
    checkpoints = train("GRPO", folder) / "checkpoints"
    table = run(*evaluate, "--model", checkpoints, "--last", "2", "--data", folder / "kk/test.jsonl", *ways)
    assert table.count("| checkpoints, mean of 2 | ") > 2 and "| Knights and Knaves, n=1,t=1 | 2 people |" in table


def test_it_is_analyzed_at_the_temperature_of_training(folder, tmp_path):
    analyze = [sys.executable, "-m", "arlopti_openrlhf", "analyze", "--out", tmp_path, "--temperature", "0.7"]
    out = train("GRPO", folder)
    size = "--prompts 4 --samples 4 --max-new-tokens 64 --tokens 2000".split()
    curves = ["--runs", f"GRPO={out}/tensorboard"]
    run(*analyze, "--model", out / "GRPO", "--data", folder / "kk/test.jsonl", *size, *curves)
    assert len(list(tmp_path.rglob("*.png"))) > 3
