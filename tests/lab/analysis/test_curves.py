"""Training curves have a band over seeds, say what is missing, and leave out what is not finite."""

import math

import pytest
from arlopti_testing.analysis_fakes import write_log, write_logs

from arlopti_openrlhf.lab.analysis import curves


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[str]:
    return write_logs(tmp_path_factory.mktemp)


def test_curves_have_a_band_over_seeds_and_say_what_is_missing(logs):
    grpo, lopti = [[curves.read_run(log) for log in group] for group in (logs[:2], logs[2:])]
    found = curves.curves({"GRPO": grpo, "Lopti": lopti})
    reward, accuracy = found["fig6"]
    line = reward["lines"]["GRPO"]
    assert line == {"seeds": 2, "steps": [1, 2], "mean": [-1.0, 1.5], "low": [-1.0, 1.0], "high": [-1.0, 2.0]}
    assert accuracy["lines"]["GRPO"]["mean"] == [pytest.approx((0.15 + 0.2) / 2)] and accuracy["missing"] == ["Lopti"]
    assert found["fig7"][1]["lines"]["GRPO"]["mean"] == [pytest.approx(0.9), pytest.approx(3.0)]
    assert [panel["missing"] for panel in found["fig8"]] == [["Lopti"], ["GRPO"], ["GRPO"]]


def test_curves_of_a_run_that_diverged(tmp_path, capsys):
    norms = {1: 0.5, 2: -1.0, 3: math.nan}  # -1 is what DeepSpeed says of a norm that is not finite
    log = write_log(tmp_path, {"train/actor_grad_norm": norms, "train/rollout/reward_mean": {1: -1.0, 3: math.inf}})
    scalars = curves.read_run(log)
    assert scalars["train/actor_grad_norm"] == {1: 0.5} and scalars["train/rollout/reward_mean"] == {1: -1.0}
    said = capsys.readouterr().out
    assert "train/actor_grad_norm is not finite at 2 steps, first at step 2: left out" in said


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ({"entropy_loss": {1: 2.0}}, {1: 2.0}),
        ({"entropy_loss": {1: 2.0}, "tokens/entropy": {1: 1.0}}, {1: 1.0}),
        ({"entropy_loss": {1: 2.0}, "tokens/p0.00-0.25/entropy": {1: 3.0}}, {}),  # other tokens are left out
    ],
)
def test_an_entropy_is_that_of_all_tokens(logged, expected):
    assert curves.entropy({f"train/{name}": series for name, series in logged.items()}) == expected


def test_reads_every_scalar_of_the_one_log_below(tmp_path):
    log = write_log(tmp_path / "run-0", {"train/kl": {1: 0.5, 2: 0.25}, "eval/accuracy": {2: 1.0}})
    assert curves.read_scalars(log) == {"train/kl": {1: 0.5, 2: 0.25}, "eval/accuracy": {2: 1.0}}
    assert curves.read_scalars(tmp_path) == curves.read_scalars(log)


def test_a_step_that_was_logged_twice_has_the_later_value(tmp_path):
    for value in (1.0, 2.0):
        write_log(tmp_path, {"train/kl": {1: value}})
    assert curves.read_scalars(tmp_path)["train/kl"] == {1: 2.0}


def test_one_log_or_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: no TensorBoard log"):
        curves.find_log(tmp_path)
    for name in ("a", "b"):
        write_log(tmp_path / name, {"train/kl": {1: 0.0}})
    with pytest.raises(ValueError, match="several TensorBoard logs, name one: .*/a/run, .*/b/run"):
        curves.find_log(tmp_path)
