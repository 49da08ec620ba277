"""A resumed run goes on under its name, in one curve of TensorBoard and in one run of wandb."""

import os
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.run import trackers


def arguments(folder, run_name: str, resumes: bool, **wandb) -> SimpleNamespace:
    wandb = SimpleNamespace(**{"key": None, "org": None, "group": None, "project": "p", "run_name": run_name} | wandb)
    logger = SimpleNamespace(tensorboard_dir=str(folder / "tensorboard"), wandb=wandb)
    return SimpleNamespace(logger=logger, ckpt=SimpleNamespace(path=str(folder / "ckpt"), load_enable=resumes))


def identified(*args) -> tuple[str, str]:
    """Return a run's name and wandb's id."""
    args = arguments(*args)
    run_id = trackers.identify(args)
    return args.logger.wandb.run_name, run_id


def test_a_resumed_run_keeps_its_name_and_its_id(tmp_path):
    name, run_id = identified(tmp_path, "ppo_1122T01:00", True)  # nothing is there yet
    assert name == "ppo_1122T01:00" and len(run_id) == 8
    assert identified(tmp_path, "ppo_1122T09:59", True) == (name, run_id)
    other, other_id = identified(tmp_path, "mine", True)
    assert other == "mine" and other_id != run_id
    assert identified(tmp_path, "ppo_1122T10:30", True) == ("mine", other_id)
    name, new_id = identified(tmp_path, "mine", False)  # a new run
    assert name == "mine" and new_id != other_id


@pytest.mark.parametrize(("checkpoint", "kept"), [(2, [0, 2]), (0, [])])
def test_lost_steps_are_in_tensorboard_once(checkpoint, kept, tmp_path):
    args = arguments(tmp_path, "run", True)
    killed = trackers.ResumableTensorboard(args)
    killed.log_eval(0, {"accuracy": 0.0})
    for step in (1, 2, 3, 4):
        killed.log_train(step, {"reward": float(step)})
    killed.log_eval(2, {"accuracy": 0.2})
    killed.log_eval(4, {"accuracy": 0.4})
    killed.close()
    resumed = trackers.ResumableTensorboard(args)
    resumed.drop_from(checkpoint + 1 if checkpoint else 0)
    for step in range(checkpoint + 1, 6):
        resumed.log_train(step, {"reward": 10.0 * step})
    resumed.log_eval(5, {"accuracy": 0.5})
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert values == [(step, step * (10.0 if step > checkpoint else 1.0)) for step in (1, 2, 3, 4, 5)]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [*kept, 5]


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    """Offline, wandb says which run it would go on in."""
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    args = arguments(tmp_path, "mine", True, key="0" * 40)
    run_id = trackers.identify(args)
    tracker = trackers.ResumableWandb(args, run_id)
    run = tracker.handle.run
    try:
        assert (run.id, run.name, run.settings.resume) == (run_id, "mine", "allow")
    finally:
        tracker.close()
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            os.environ.pop(name)
