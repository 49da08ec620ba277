"""A checkpoint is loaded without running what it names, and those of earlier commits still load."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from arlopti_testing.stored_run import STEP, unpack
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf.ops.checkpoints import files, state, unpickling

ARCHIVES = sorted((Path(__file__).parent / "data").glob("*.tar.gz"))


class Calls:
    """Stands for a crafted object, whose unpickling leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_a_checkpoint_of_an_earlier_commit_is_read(archive, tmp_path):
    unpack(archive, tmp_path)
    checkpoint = tmp_path / "ckpt" / "_actor" / f"global_step{STEP}"
    assert files.problems(checkpoint) == [] and files.version_of(checkpoint) is None
    assert not any(unpickling.not_allowed(path) for path in checkpoint.glob("*.pt"))
    with unpickling.restricted():  # weights_only=False is DeepSpeed's
        states = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)
        own = torch.load(checkpoint / "process_rank_0.pt", weights_only=True)
        (optimizer,) = (torch.load(path, weights_only=False) for path in checkpoint.glob("*optim_states.pt"))
    assert states["global_step"] == STEP and "base_optimizer_state" in optimizer["optimizer_state_dict"]
    leftover = states["data_loader_state_dict"]["leftover"]
    assert type(leftover) is list and leftover and {type(sample) for sample in leftover} == {Experience}
    for saved in (own["random"], unpickling.unpacked(states["controller_random"])):
        state.set_random_state(saved)
        assert np.array_equal(np.random.get_state()[1], saved["numpy"][1])


def test_a_crafted_checkpoint_calls_nothing(tmp_path):
    path, called = tmp_path / "process_rank_0.pt", tmp_path / "called"
    torch.save({"random": Calls(called)}, path)
    assert unpickling.not_allowed(path) == ["posix.system"]
    with unpickling.restricted(), pytest.raises(pickle.UnpicklingError, match="GLOBAL posix.system"):
        torch.load(path, weights_only=False)
    packed = torch.frombuffer(bytearray(pickle.dumps(Calls(called))), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError, match="posix.system is not allowed"):
        unpickling.unpacked(packed)
    assert not called.exists()


def test_a_user_who_trusts_a_checkpoint_says_so_by_pytorchs_own_variable(tmp_path, monkeypatch):
    path, called = tmp_path / "a.pt", tmp_path / "called"
    torch.save(Calls(called), path)
    monkeypatch.setenv(unpickling.OFF, "1")
    with unpickling.restricted():
        torch.load(path, weights_only=False)
    assert called.exists() and unpickling.not_allowed(path) == []


def test_pytorchs_variable_is_as_it_was_before():
    before = dict(os.environ)
    with pytest.raises(KeyError), unpickling.restricted():
        raise KeyError
    assert dict(os.environ) == before


def test_the_random_state_survives_and_needs_no_class():
    saved = unpickling.unpacked(unpickling.packed(state.random_state()))
    numbers = np.random.rand(3), torch.rand(3)
    state.set_random_state(saved)
    assert np.array_equal(np.random.rand(3), numbers[0]) and torch.equal(torch.rand(3), numbers[1])


def test_what_is_packed_prints_short():
    assert len(str(unpickling.packed([]))) < 100
