"""A run that is stopped and resumed equals the run that was not, bit for bit, on the whole stack."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.long

# Notes each call, and fails from call LIMIT on. Rewards differ between the samples of a prompt.
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    import json, torch
    with open({calls!r}, "a+") as file:
        file.seek(0)
        if len(file.readlines()) >= {limit}:
            raise KeyError("stopped here")
        file.write(json.dumps(prompts[0]) + "\\n")
    rewards = torch.tensor([float(sum(map(ord, query)) % 7) - 3 for query in queries])
    return {{"rewards": rewards, "scores": (rewards > 0).float(), "extra_logs": {{}}}}
"""
NEVER = 10**9
TWO_RANKS = """--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --vllm.num_engines 2 --train.colocate_all
    --train.deterministic --ckpt.save_steps 2"""


@pytest.fixture
def train(tiny_model, tiny_data, tmp_path):
    """Return train(folder, flags, prompts, limit), which returns the prompts of its reward calls, in their order.

    Each 8 prompts, with 4 samples each, are a step. With a limit the run fails at that reward call.
    """

    def run(folder: Path, flags: str, prompts: int = 32, limit: int = NEVER) -> list[str]:
        folder.mkdir(exist_ok=True)
        reward, calls = folder / "reward.py", folder / f"calls_{limit}.jsonl"
        reward.write_text(REWARD.format(calls=str(calls), limit=NEVER), encoding="utf-8")
        command = f"""
            {sys.executable} -m arlopti_openrlhf.cli.train_ppo_ray
            --actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples {prompts}
            --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
            --reward.remote_url {reward} --rollout.max_new_tokens 16
            --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4
            --train.batch_size 16 --train.micro_batch_size 4 --vllm.enforce_eager --vllm.sync_backend gloo
            --actor.adam.lr 1e-3 --ckpt.output_dir {folder}/final --ckpt.path {folder}/ckpt --ckpt.load_enable
            --logger.tensorboard_dir {folder}/tensorboard --logger.wandb.run_name run {flags}
        """.split()
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        # The pre-flight of the run asks as often as that of a dry run.
        subprocess.run([*command, "--dry-run"], env=environment, capture_output=True, check=True, timeout=300)
        probed = len(calls.read_text("utf-8").splitlines())
        calls.unlink()
        reward.write_text(REWARD.format(calls=str(calls), limit=limit + probed), encoding="utf-8")
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, errors="replace"
        )
        log = result.stdout + result.stderr
        assert (result.returncode == 0) == (limit == NEVER), log[-6000:]
        assert limit == NEVER or "stopped here" in log, log[-6000:]
        return [json.loads(line) for line in calls.read_text("utf-8").splitlines()][probed:]

    return run


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return a run's TensorBoard scalars, but those that measure time."""
    events = EventAccumulator(str(folder / "tensorboard" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if "timing" not in name]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def assert_equal(one: Any, other: Any, where: str) -> None:
    """Compare what a checkpoint holds. Tensors must have equal bits."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num()), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}/{i}")
    elif type(one).__eq__ is not object.__eq__:
        assert one == other, where


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Compare the final models, everything in the checkpoints of the last step, and the curves."""
    ours, theirs = curves(one), curves(other)
    assert len(ours["train/policy_loss" if "train/policy_loss" in ours else "train/lopti/low/policy_loss"]) == step
    assert len({value for _, value in ours["train/rollout/reward_mean"]}) > 1
    assert ours == theirs
    assert_equal(load_file(one / "final/model.safetensors"), load_file(other / "final/model.safetensors"), "model")
    names = [
        sorted(path.relative_to(folder) for path in (folder / f"ckpt/_actor/global_step{step}").rglob("*.pt"))
        for folder in (one, other)
    ]
    assert names[0] == names[1] and any("optim" in path.name for path in names[0])
    for path in names[0]:
        states = [torch.load(folder / path, map_location="cpu", weights_only=False) for folder in (one, other)]
        assert_equal(*states, str(path))


def test_grpo_with_both_methods_and_zero_3(train, tiny_data, tmp_path):
    """Two runs are equal, of which one stops in its third step, after a checkpoint and an evaluation."""
    flags = f"""{TWO_RANKS} --ds.zero_stage 3 --ds.packing_samples --train.enable_ema
        --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
        --algo.ar.alpha 0.3 --algo.lopti.quantile 0.3
        --eval.dataset {tiny_data} --eval.steps 2 --eval.sampling kk_*:n=1,t=1"""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    calls = train(whole, flags)
    # The evaluation before the first step, two steps, the evaluation after them, and some of the third step.
    before = train(parts, flags, limit=32 + 64 + 32 + 10)
    assert Counter(before[:128]) == Counter(calls[:128])
    train(parts, flags)
    assert_same_run(whole, parts, step=4)


def test_reinforce_plus_plus_with_zero_2(train, tmp_path):
    flags = f"""{TWO_RANKS} --ds.zero_stage 2 --algo.advantage.estimator reinforce --algo.kl.init_coef 0.01
        --algo.kl.estimator k1 --actor.max_norm 0.5"""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, flags)
    # As if the run had been killed after its third step: what is logged of that is replaced.
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "ckpt/_actor/global_step4")
    shutil.rmtree(parts / "final")
    train(parts, flags)
    assert_same_run(whole, parts, step=4)


def test_asynchronous_trains_each_prompt_once(train, tmp_path):
    """The resumed run asks for as many prompts as were not trained, once each, and all have been asked for."""
    flags = """--train.async_enable --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1
        --algo.advantage.estimator group_norm --ckpt.save_steps 1 --rollout.vllm_generate_batch_size 12"""
    before = train(tmp_path, flags, prompts=48, limit=4 * 32 + 10)
    checkpoints = [path.name for path in (tmp_path / "ckpt/_actor").glob("global_step*")]
    done = max(int(name.removeprefix("global_step")) for name in checkpoints)
    assert 1 <= done < 6
    after = train(tmp_path, flags, prompts=48)
    assert Counter(after) == Counter(4 * sorted(set(after))) and len(set(after)) == 48 - 8 * done
    assert len(set(before + after)) == 48
    assert [step for step, _ in curves(tmp_path)["train/policy_loss"]] == [1, 2, 3, 4, 5, 6]
