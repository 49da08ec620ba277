"""The core trains by itself: all other rooms are deleted from a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.upstream import find_source

pytestmark = pytest.mark.long  # `make core` has them
PACKAGE = Path(__file__).parents[1] / "arlopti_openrlhf"
INSTALL = """from arlopti_openrlhf.launcher import install
install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"], update="{update}")
"""
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    import torch
    rewards = torch.tensor([float(sum(map(ord, query)) % 7) - 3 for query in queries])
    return {"rewards": rewards, "scores": (rewards > 0).float(), "extra_logs": {}}
"""


def copy_without(folder: Path, *rooms: str) -> dict[str, str]:
    """Copy the package without these rooms, and return the environment of a Python that finds the copy."""
    copied = folder / "arlopti_openrlhf"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for room in rooms:
        shutil.rmtree(copied / room)
    search = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search}


@pytest.mark.parametrize("update", ["selective", "stock"])
def test_two_steps_train_without_the_rooms_around_the_core(update, tmp_path, tiny_model, tiny_data):
    environment = copy_without(tmp_path, "cli", "ops", "grading", "evaluation", "lab")
    script = tmp_path / "train.py"
    upstreams = find_source("openrlhf.cli.train_ppo_ray").read_text("utf-8")
    script.write_text(INSTALL.format(update=update) + upstreams, encoding="utf-8")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    flags = f"""
        --actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples 4
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
        --reward.remote_url {tmp_path}/reward.py --rollout.max_new_tokens 12
        --rollout.batch_size 2 --rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 4
        --train.batch_size 4 --train.micro_batch_size 4 --vllm.num_engines 1 --train.colocate_all
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.enforce_eager --vllm.sync_backend gloo
        --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
        --ckpt.output_dir {tmp_path}/final --ckpt.path {tmp_path}/ckpt"""
    command = [sys.executable, str(script), *flags.split()]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "Global step 2" in said and "lopti/low/policy_loss" in said and "ar/mean_weight" in said
    assert (tmp_path / "final" / "model.safetensors").exists()


IMPORT_THE_CORE = """
import importlib, pathlib, arlopti_openrlhf
from arlopti_openrlhf import bindings
folder = pathlib.Path(arlopti_openrlhf.__file__).parent
assert not (folder / "cpu").exists()
for path in sorted(folder.rglob("*.py")):
    name = ".".join(("arlopti_openrlhf", *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
    if not name.endswith(("__main__", "lm_head_triton")):  # the command's, and what needs Triton
        importlib.import_module(name)
for has in ({bindings.SELECTIVE}, {bindings.REFERENCE}):
    print(*(bindings.resolve(row.ours).__name__ for row in bindings.rows(has)))
"""


FLASH_ATTN = {  # what OpenRLHF imports of it without being asked; nobody calls it here
    "bert_padding.py": "index_first_axis = pad_input = rearrange = unpad_input = None",
    "utils/distributed.py": "all_gather = None",
}


def test_the_core_imports_without_the_port_to_cpus_too(tmp_path):
    """As on a machine with a GPU, with flash-attn."""
    environment = copy_without(tmp_path, "cli", "ops", "grading", "evaluation", "lab", "cpu")
    for name, code in FLASH_ATTN.items():
        path = tmp_path / "flash_attn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(code, encoding="utf-8")
    environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-c", IMPORT_THE_CORE]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    selective = "TokenUpdateTrainer PolicyActor SelectiveActor SelectiveActor WholePrompts WholePrompts"
    assert done.stdout.splitlines()[-2:] == ["ReferenceTrainer", selective][::-1]
