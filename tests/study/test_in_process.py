"""A run in one process: what it logs, and that it is the same run whenever it is the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arlopti_openrlhf.lab.analysis.curves import Series, read_scalars
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows

ROOT = Path(__file__).parents[2]
PEOPLE = (2, 3)

# A policy of random weights answers nothing. So its reward here follows from what it writes, whatever that is.
REWARD = """
import torch

def reward_func(queries, prompts, labels):
    rewards = torch.tensor([float(sum(map(ord, query)) % 7) for query in queries])
    zeros = torch.zeros(len(queries))
    return {"rewards": rewards.tolist(), "scores": zeros, "extra_logs": {"well_formed": zeros, "answered": zeros}}
"""
SMALL = "--rollout.batch_size 4 --train.batch_size 16 --train.micro_batch_size 8 --rollout.max_new_tokens 12"


@pytest.fixture(scope="module")
def inputs(make_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    Path(make_model()).rename(folder / "model")
    write_rows(generate_rows(PEOPLE, 4, held_out=False, seed=0), folder / "train.jsonl")
    test = generate_rows(PEOPLE, 4, held_out=True, seed=0)
    greedy = [row | {"datasource": f"{row['datasource']}_greedy"} for row in test[4:]]
    write_rows(test[:4] + greedy, folder / "test.jsonl")
    (folder / "reward.py").write_text(REWARD)
    return folder


def flags_of(name: str) -> str:
    """Return the flags of a run of the second study, as its result has them."""
    with open(ROOT / "study/results/family.jsonl", encoding="utf-8") as lines:
        return next(run["configuration"]["flags"] for run in map(json.loads, lines) if run["run"] == name)


def train(name: str, inputs: Path, out: Path, more: str = "") -> dict[str, Series]:
    """Return what a small run logs, of 2 steps of 4 puzzles x 8 answers."""
    more += f" --reward.remote_url {inputs / 'reward.py'}"
    flags = f"{flags_of(name)} {SMALL} {more}".replace("INPUTS", str(inputs)).replace("OUT", str(out)).split()
    command = [sys.executable, "-m", "study.in_process", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read_scalars(out / "tensorboard")


def without_times(scalars: dict[str, Series]) -> dict[str, Series]:
    return {name: values for name, values in scalars.items() if "timing" not in name}


@pytest.mark.long
def test_a_method_that_changes_nothing_gives_the_same_run_to_the_bit(inputs, tmp_path):
    grpo = train("decisions-grpo-0", inputs, tmp_path / "grpo")
    neutral = train("decisions-ar-0", inputs, tmp_path / "neutral", "--algo.token_method_args ar.alpha=0")
    rewards = grpo["train/rollout/reward_mean"]
    assert rewards[1] != rewards[2] and grpo["train/actor_grad_norm"][1] > 0
    assert without_times(grpo).items() <= without_times(neutral).items()
    assert list(neutral["train/ar/mean_weight"].values()) == [1.0, 1.0]
    assert all(len(neutral[f"eval/kk_{people}ppl/accuracy"]) == 2 for people in PEOPLE)


@pytest.mark.long
def test_dppo_leaves_out_no_token_where_the_policy_has_drawn_them_itself(inputs, tmp_path):
    correction = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 0 inf"
    found = train("decisions-grpo-0", inputs, tmp_path, f"--algo.token_method dppo {correction}")
    for name, value in {"mean_weight": 1, "zero_share": 0, "effective_share": 1}.items():
        assert list(found[f"train/token_method/dppo/{name}"].values()) == [value, value]
    gaps = list(found["train/vllm_kl"].values())
    assert len(gaps) == 2 and max(map(abs, gaps)) < 1e-5


@pytest.mark.long
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(inputs, tmp_path):
    # Eight prompts in two mini-batches, which are drawn anew in each step.
    saves = f"--ckpt.path {tmp_path / 'checkpoints'} --ckpt.save_steps 1 --eval.steps 1"
    saves += " --rollout.batch_size 8 --train.batch_size 32 --train.num_episodes 2"
    whole = train("decisions-lopti-0", inputs, tmp_path / "whole", saves)
    rest = train("decisions-lopti-0", inputs, tmp_path / "rest", f"{saves} --ckpt.load_enable")
    assert [*rest["train/rollout/reward_mean"]] == [2] and [*whole["eval/kk_2ppl/accuracy"]] == [0, 1, 2]
    expected = {name: {2: values[2]} for name, values in whole.items()}
    assert without_times(rest) == without_times(expected)
    weights = [load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "rest")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


STEP = """
import json, sys, torch
from examples.in_one_process import FLAGS, Training, arguments
inputs, update = sys.argv[1:]
flags = "--rollout.batch_size 2 --train.batch_size 16 --train.micro_batch_size 4 --rollout.max_new_tokens 12 "
flags += f"--algo.lopti.eta 0.004 --reward.remote_url {inputs}/reward.py --actor.model_name_or_path {inputs}/model "
args = arguments([*FLAGS.split(), *flags.split(), "--actor.update", update])
training = Training(args)
torch.manual_seed(0)
puzzles = [json.loads(line) for line in open(f"{inputs}/train.jsonl", encoding="utf-8")]
print(json.dumps(training.step(puzzles[:2])))
"""


@pytest.mark.long
def test_the_examples_step_is_the_same_with_the_reference_and_the_selective_update(inputs):
    found = []
    for update in ("stock", "selective"):
        done = subprocess.run(
            [sys.executable, "-c", STEP, str(inputs), update], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    reference, selective = found
    for name in (
        "rollout/reward_mean",
        "lopti/low/actor_grad_norm",
        "lopti/high/actor_grad_norm",
        "lopti/low/num_tokens",
    ):
        assert reference[name] == pytest.approx(selective[name], rel=1e-4) and reference[name] > 0


def test_the_action_mask_selects_the_answer():
    from examples.in_one_process import as_experience

    one = as_experience(prompt=[7, 8, 9], answer=[4, 5, 0], is_truncated=False)
    assert one.sequences[:, 1:][one.action_mask.bool()].tolist() == [4, 5, 0]
    assert (one.response_length.item(), one.total_length.item(), one.truncated.item()) == (3, 6, False)
