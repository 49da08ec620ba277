"""A checkpoint is loaded without running what it names."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from arlopti_openrlhf.ops.checkpoints import unpickling


class Calls:
    """Stands for a crafted object, whose unpickling leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_crafted_checkpoint_calls_nothing(tmp_path):
    path, called = tmp_path / "process_rank_0.pt", tmp_path / "called"
    torch.save({"random": Calls(called)}, path)
    assert unpickling.not_allowed(path) == ["posix.system"]
    with unpickling.restricted(), pytest.raises(pickle.UnpicklingError, match="GLOBAL posix.system"):
        torch.load(path, weights_only=False)
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
