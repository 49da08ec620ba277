"""Two real ranks save, resume and go on: bit for bit as if they had never ended, and together where one fails."""

import json
import os
import random
import resource
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import torch
from arlopti_testing.update_workers import OFF, SAMPLES, Group, cluster, experiences, flags
from openrlhf.utils import deepspeed

from arlopti_openrlhf.ops.checkpoints import files
from arlopti_openrlhf.ops.checkpoints import saving as checkpoints
from arlopti_openrlhf.ops.lifecycle.stopping import Diverged

METHODS = OFF | {"algo.lopti.eta": 0.5}
pytestmark = pytest.mark.whole_stack


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    with cluster():
        deepspeed.DeepspeedStrategy = checkpoints.CheckpointStrategy
        yield


def actor(group: Group, method: str, *args, **kwargs) -> list:
    return ray.get(group.workers[group.kind].async_run_method(method, *args, **kwargs), timeout=240)


def start(model: str, folder: Path, *more: str, max_steps: int = 8) -> Group:
    """Two optimizer steps for each rollout batch, and a learning rate that falls."""
    schedule = "--actor.adam.lr 1e-2 --actor.lr_scheduler linear --ckpt.load_enable".split()
    paths = ["--ckpt.path", str(folder), "--ckpt.output_dir", str(folder / "final"), "--ckpt.max_num", "2"]
    batch = ["--train.batch_size", str(SAMPLES // 2)]
    return Group(flags(model, *schedule, *paths, *batch, *more), max_steps=max_steps)


def everything(group: Group) -> list[torch.Tensor]:
    return [*group.parameters(), *group.parameters(averaged=True)]


def random_numbers(group: Group) -> list[tuple]:
    """Return what each rank's generators give next. (`run` seeds PyTorch's, so that its results do not show it.)"""
    return actor(group, "call", lambda _: (random.random(), np.random.rand(), torch.rand(()).item()))


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.long) for stage in "23"])
def test_a_resumed_run_is_the_same_run(stage, tiny_model, tmp_path):
    group = start(tiny_model, tmp_path, "--train.enable_ema", "--ds.zero_stage", stage)
    group.run(experiences(1), METHODS)
    actor(group, "save_checkpoint", tag="global_step1", client_states={"global_step": 1})
    at_checkpoint, numbers = everything(group), random_numbers(group)
    uninterrupted = group.run(experiences(2), METHODS)
    expected = everything(group)

    group.start()
    assert all(map(torch.equal, everything(group), at_checkpoint))
    assert random_numbers(group) == numbers and numbers[0] != numbers[1]
    assert [states["global_step"] for states in actor(group, "get_checkpoint_states")] == [1, 1]
    resumed = group.run(experiences(2), METHODS)
    assert resumed.last_rate == uninterrupted.last_rate > 0
    assert [uids for _, uids, *_ in resumed.seen] == [uids for _, uids, *_ in uninterrupted.seen]
    assert len(resumed.gradients) == len(uninterrupted.gradients) == 4
    for ours, theirs in zip(resumed.gradients, uninterrupted.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, everything(group), expected))
    assert not all(map(torch.equal, at_checkpoint, expected))


@pytest.mark.parametrize("stage", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_an_average_that_a_checkpoint_lacks_starts_at_its_weights(stage, tiny_model, tmp_path):
    """Not at the model before its training, of which much would be left in the model that is saved."""
    group = start(tiny_model, tmp_path, "--ds.zero_stage", stage)
    group.run(experiences(1), METHODS)
    actor(group, "save_checkpoint", tag="global_step1", client_states={"global_step": 1})
    trained = group.parameters()
    averaging = start(tiny_model, tmp_path, "--train.enable_ema", "--ds.zero_stage", stage)
    assert all(map(torch.equal, averaging.parameters(averaged=True), trained))


def test_a_run_that_is_resumed_with_fewer_steps_stays_at_the_lowest_rate(tiny_model, tmp_path):
    """Lopti takes 4 steps for each rollout batch: 8 of 16 are done, and the new plan has 4."""
    schedule = "--actor.lr_scheduler", "cosine_with_min_lr"
    group = start(tiny_model, tmp_path, *schedule)
    for seed in (1, 2):
        group.run(experiences(seed), METHODS)
    actor(group, "save_checkpoint", tag="global_step2", client_states={"global_step": 2})
    group = start(tiny_model, tmp_path, *schedule, "--actor.adam.lr", "1", "--actor.max_norm", "0.2", max_steps=2)
    assert actor(group, "call", lambda probe: probe.actor.model.optimizer.clip_grad) == [0.2] * 2
    # The checkpoint's optimizer has the highest rate, as `cli.same_run` says: a tenth of 1e-2 is the minimum.
    assert actor(group, "call", lambda probe: probe.actor_scheduler.get_last_lr()[0])[0] != 1e-2
    assert [group.run(experiences(seed), METHODS).last_rate for seed in (3, 4)] == [pytest.approx(1e-3)] * 2


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def forge(checkpoint: Path, name: str, content: object) -> None:
    """Replace a file of a checkpoint, and what its manifest says of it."""
    torch.save(content, checkpoint / name)
    manifest = json.loads((checkpoint / files.MANIFEST).read_text("utf-8"))
    manifest["files"][name] = {"size": (checkpoint / name).stat().st_size}
    (checkpoint / files.MANIFEST).write_text(json.dumps(manifest), "utf-8")


def limit_files(group: Group, rank: int, size: int) -> None:
    """Let a rank write no file that is larger, in bytes. torch then says "iostream error" and nothing else."""
    call = group.workers[group.kind]._actor_handlers[rank].__ray_call__.remote
    ray.get(call(lambda probe: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))))


def test_damage_and_disks_that_take_no_more(tiny_model, tmp_path):
    """One group of workers for all, because it takes long to start."""
    group = start(tiny_model, tmp_path, "--train.enable_ema")
    group.run(experiences(1), METHODS)
    at_checkpoint = everything(group)
    for step in (1, 2, 3):
        actor(group, "save_checkpoint", tag=f"global_step{step}", client_states={"global_step": step})
    folder = tmp_path / "_actor"
    assert files.tags(folder) == ["global_step2", "global_step3"]

    # One rank cannot write: all go on, what there was stays, and the next one is written.
    limit_files(group, rank=1, size=200_000)
    actor(group, "save_checkpoint", tag="global_step4", client_states={"global_step": 4})
    with pytest.raises(checkpoints.NotWritten, match="File too large"):
        limit_files(group, rank=0, size=200_000)
        actor(group, "save_model")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["global_step2", "global_step3"]
    assert not list((tmp_path / "final").iterdir())
    for rank in (0, 1):
        limit_files(group, rank, resource.RLIM_INFINITY)
    (tmp_path / "final" / "kept").mkdir()  # OpenRLHF's default keeps the checkpoints there
    actor(group, "save_model")
    model = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"kept", "config.json", "model.safetensors", "tokenizer.json"} <= model
    assert not any(name.startswith(files.WRITING) for name in model)

    # The newest is damaged: the one before it is loaded. Both are: the run does not start anew in silence.
    damaged = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with damaged.open("r+b") as file:  # as large as before
        file.seek(damaged.stat().st_size // 2)
        file.write(bytes(1 << 16))
    group.start()
    assert [states["global_step"] for states in actor(group, "get_checkpoint_states")] == [2, 2]
    assert all(map(torch.equal, everything(group), at_checkpoint))
    (folder / "global_step2" / "process_rank_1.pt").unlink()
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", damaged.name):  # a rank alone would wait for the other
        forge(damaged.parent, name, {"optimizer_state_dict": Path})
    with pytest.raises(checkpoints.NotAllowed, match=r"it would call pathlib\.Path, which no run's checkpoint does"):
        group.start()
    cut(damaged)
    with pytest.raises(checkpoints.NoWholeCheckpoint, match=r"global_step3 .*was written.*global_step2 .*missing"):
        group.start()

    # A folder in which nothing was ever finished is a run's beginning.
    for tag in files.tags(folder):
        (folder / tag / files.MANIFEST).unlink()
        (folder / tag).rename(folder / f"{files.WRITING}{tag}")
    group.start()
    assert actor(group, "get_checkpoint_states") == [checkpoints.BEGINNING] * 2
    assert not files.tags(folder)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_weights_that_are_not_finite_are_not_saved(stage, tiny_model, tmp_path):
    """One NaN on one rank stops both, and names the parameter."""

    def spoil(probe) -> None:
        weight = dict(probe.actor.model.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        (weight.ds_tensor if stage == "3" else weight).data.flatten()[-1] = torch.nan

    group = start(tiny_model, tmp_path, "--ds.zero_stage", stage)
    actor(group, "save_checkpoint", tag="global_step1")
    ray.get(group.workers[group.kind]._actor_handlers[1].__ray_call__.remote(spoil))
    for method, kwargs in (("save_checkpoint", {"tag": "global_step2"}), ("save_model", {})):
        for ref in group.workers[group.kind].async_run_method(method, **kwargs):
            with pytest.raises(Diverged, match=r"first in model\.layers\.1\.mlp\.up_proj\.weight"):
                ray.get(ref, timeout=240)
    assert [path.name for path in (tmp_path / "_actor").iterdir() if path.is_dir()] == ["global_step1"]
    assert not (tmp_path / "final").exists()


def test_a_model_takes_the_place_of_one_with_folders(tmp_path):
    """A tokenizer with several chat templates has a folder of them."""
    for text in ("old", "new"):
        (tmp_path / "writing/templates").mkdir(parents=True)
        for name in ("config.json", "templates/tool.jinja"):
            (tmp_path / "writing" / name).write_text(text)
        checkpoints._move_up(tmp_path / "writing")
    assert {path.read_text() for path in tmp_path.rglob("*.*")} == {"new"} and not (tmp_path / "writing").exists()


def test_older_checkpoints_that_cannot_be_removed_stay(tmp_path, monkeypatch, capsys):
    """As on a network's file system. The new one is whole, so the run goes on."""

    monkeypatch.setattr(checkpoints, "on_rank_0", lambda function: function())
    monkeypatch.setattr(checkpoints, "everywhere", lambda function: [function()])
    monkeypatch.setattr(checkpoints, "say", print)
    monkeypatch.setattr(checkpoints.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(checkpoints, "_require_finite", lambda engine: None)
    monkeypatch.setattr(checkpoints.CheckpointStrategy, "_write", lambda self, model, to, states: (to / "a").touch())
    monkeypatch.setattr(files, "rotate", Mock(side_effect=OSError(5, "Input/output error")))
    strategy = object.__new__(checkpoints.CheckpointStrategy)
    strategy.args, strategy.flags = SimpleNamespace(critic=SimpleNamespace(model_name_or_path=None)), None
    strategy.save_ckpt(None, str(tmp_path / "_actor"), "global_step1")
    assert "older checkpoints stay: [Errno 5] Input/output error" in capsys.readouterr().out
    assert files.newest_published([tmp_path / "_actor"]) == "global_step1"
    monkeypatch.setattr(files, "begin", lambda *args: None)  # rank 0 has made the folder on a machine of its own
    strategy.save_ckpt(None, str(tmp_path / "_actor"), "global_step2")
    assert "step2 is NOT written: --ckpt.path is no folder that all nodes share" in capsys.readouterr().out
