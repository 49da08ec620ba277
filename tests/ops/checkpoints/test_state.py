"""A resumed run takes up its name, and its id with wandb."""

from types import SimpleNamespace

import pytest

from arlopti_openrlhf.ops.checkpoints import state
from arlopti_openrlhf.ops.lifecycle import progress


def arguments(folder, run_name: str, resumes: bool) -> SimpleNamespace:
    logger = SimpleNamespace(wandb=SimpleNamespace(run_name=run_name))
    ckpt = SimpleNamespace(path=str(folder / "ckpt"), load_enable=resumes, disable_ds=False, save_hf=False)
    return SimpleNamespace(logger=logger, ckpt=ckpt)


def identified(*args) -> tuple[str, str]:
    """Return a run's name and wandb's id."""
    args = arguments(*args)
    run_id = state.identify(args)
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


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"run_name": ', "[" * 200_000])
def test_a_run_whose_kept_name_a_power_loss_has_emptied_gets_another_and_says_so(content, tmp_path, capsys):
    identified(tmp_path, "mine", True)
    kept = tmp_path / "ckpt" / progress.RUN_FILE
    kept.write_text(content)
    name, run_id = identified(tmp_path, "ppo_1122T01:00", True)
    assert name == "ppo_1122T01:00" and f"{kept} cannot be read" in capsys.readouterr().out
    assert identified(tmp_path, "ppo_1122T02:00", True) == (name, run_id) and not capsys.readouterr().out


def test_a_run_that_saves_no_checkpoint_leaves_the_name_that_is_kept(tmp_path):
    identified(tmp_path, "another run", False)
    kept = (tmp_path / "ckpt" / progress.RUN_FILE).read_text()
    args = arguments(tmp_path, "mine", False)
    args.ckpt.disable_ds = True
    assert state.identify(args) not in kept and args.logger.wandb.run_name == "mine"
    assert (tmp_path / "ckpt" / progress.RUN_FILE).read_text() == kept
