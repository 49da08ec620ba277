"""A TensorBoard log is found below a folder and read whole. The later of two values of one step counts."""

import pytest
from arlopti_testing.analysis_fakes import write_log

from arlopti_openrlhf.lab.analysis.scalars import find_log, read_scalars


def test_reads_every_scalar_of_the_one_log_below(tmp_path):
    log = write_log(tmp_path / "run-0", {"train/kl": {1: 0.5, 2: 0.25}, "eval/accuracy": {2: 1.0}})
    assert read_scalars(log) == {"train/kl": {1: 0.5, 2: 0.25}, "eval/accuracy": {2: 1.0}}
    assert read_scalars(tmp_path) == read_scalars(log)


def test_a_step_that_was_logged_twice_has_the_later_value(tmp_path):
    for value in (1.0, 2.0):
        write_log(tmp_path, {"train/kl": {1: value}})
    assert read_scalars(tmp_path)["train/kl"] == {1: 2.0}


def test_one_log_or_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: no TensorBoard log"):
        find_log(tmp_path)
    for name in ("a", "b"):
        write_log(tmp_path / name, {"train/kl": {1: 0.0}})
    with pytest.raises(ValueError, match="several TensorBoard logs, name one: .*/a/run, .*/b/run"):
        find_log(tmp_path)
