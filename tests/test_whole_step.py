"""`benchmarks/whole_step.py`: the runs that it compares, and what it reads of them. A run itself takes minutes."""

import importlib.util
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from arlopti_openrlhf.cli import command_line, method_checks, quickstart
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.lab.analysis.curves import read_scalars

spec = importlib.util.spec_from_file_location("whole_step", Path(__file__).parents[1] / "benchmarks" / "whole_step.py")
whole_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(whole_step)


@pytest.mark.parametrize("variant, is_ours", [(whole_step.STOCK, False), (whole_step.OURS, True)])
def test_the_variants_differ_in_the_methods_and_the_update_alone(variant, is_ours, tmp_path):
    plan = Plan(tmp_path, TASKS["tiny"], TASKS["tiny"].full, seed=0)
    flags = quickstart.training_flags(plan)
    parsed = parse(whole_step.flags_of(variant, flags))
    assert method_checks.is_selective(command_line.hierarchize(parsed)) == is_ours
    ours, flat = vars(parse(flags)), vars(parsed)
    assert (flat["algo.ar.alpha"], flat["algo.lopti.eta"]) == ((0.3, 0.5) if is_ours else (None, None))
    assert flat["logger.probability_stats"] == ("bins" if is_ours else "off")  # OpenRLHF's update has none
    differ = {name for name in flat if flat[name] != ours[name] and name != "eval.sampling"}
    assert differ <= {"algo.ar.alpha", "algo.lopti.eta", "actor.update", "logger.probability_stats"}


def log_run(folder: Path, **seconds: list[float]) -> None:
    writer = SummaryWriter(folder)
    for name, values in seconds.items():
        for step, value in enumerate(values, start=1):
            writer.add_scalar(f"train/timing/{name}", value, step)
    writer.close()


def test_medians_without_the_first_step(tmp_path):
    parts = {"generation": [9, 1, 2, 3], "make_experience": [1] * 4, "ppo_train": [2, 4, 4, 4], "broadcast": [0.5] * 4}
    log_run(tmp_path, **parts, step_total=[sum(values) for values in zip(*parts.values(), strict=True)])
    run = whole_step.seconds_by_phase(read_scalars(tmp_path))
    assert run["generation and reward"] == [9, 1, 2, 3] and run["step"] == [12.5, 6.5, 7.5, 8.5]
    stock = run | {"start and end": [20.0], "load": (1.0, 1.0, 1.0)}
    faster = stock | {"update": [1, 1, 1, 1], "load": (3.0, 1.0, 1.0)}
    lines = whole_step.table({"stock": [stock], "ours": [faster, stock, faster]}).splitlines()
    assert "| generation and reward | 2.00 (2.00) | 2.00 (2.00, 2.00, 2.00) | 1.00 |" in lines
    assert "| update | 4.00 (4.00) | 1.00 (1.00, 4.00, 1.00) | 0.25 |" in lines
    assert "| start and end | 20.00 (20.00) | 20.00 (20.00, 20.00, 20.00) | 1.00 |" in lines
    assert lines[-1] == "load of the machine (mean over a minute): 1.0 to 3.0"


def test_a_phase_that_is_not_logged_is_named(tmp_path):
    log_run(tmp_path, generation=[1.0])
    with pytest.raises(ValueError, match="timing/make_experience"):
        whole_step.seconds_by_phase(read_scalars(tmp_path))
