"""A checkpoint is loaded without running what it names."""

import os
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from arlopti_openrlhf.ops.checkpoints import unpickling


class Calls:
    """Stands for a crafted object, whose unpickling calls a function."""

    def __init__(self, *called: Any) -> None:
        self.called = called

    def __reduce__(self):
        return self.called[0], self.called[1:]


def test_a_crafted_checkpoint_calls_nothing(tmp_path):
    path, called, before = tmp_path / "process_rank_0.pt", tmp_path / "called", dict(os.environ)
    torch.save({"random": Calls(os.system, f"touch {called}")}, path)
    assert unpickling.not_allowed(path) == ["posix.system"]
    with unpickling.restricted(), pytest.raises(pickle.UnpicklingError, match="GLOBAL posix.system"):
        torch.load(path, weights_only=False)
    assert not called.exists() and dict(os.environ) == before


def test_getattr_with_which_python_3_11_2_pickles_an_enumerations_members_gives_no_more(tmp_path):
    path = tmp_path / "a.pt"
    for name, found in ("weights", ZeroStageEnum.weights), ("__init__", None):
        torch.save(Calls(getattr, ZeroStageEnum, name), path)
        assert unpickling.not_allowed(path) == []
        with unpickling.restricted(), nullcontext() if found else pytest.raises(KeyError):
            assert torch.load(path, weights_only=False) == found


def test_a_user_who_trusts_a_checkpoint_says_so_by_pytorchs_own_variable(tmp_path, monkeypatch):
    path, called = tmp_path / "a.pt", tmp_path / "called"
    torch.save(Calls(os.system, f"touch {called}"), path)
    monkeypatch.setenv(unpickling.OFF, "1")
    with unpickling.restricted():
        torch.load(path, weights_only=False)
    assert called.exists() and unpickling.not_allowed(path) == []
