"""The agreement of gradients is held against training, method by method."""

from pathlib import Path

import pytest
from arlopti_testing.study_fakes import of_name, result

from study import runs, stored, validation


def asked(moves: dict[str, float], cosine: float = 0.4) -> dict:
    """Return what `study.warm_start_agreement` stores.

    One cell agrees. Each method makes something of its share of 0.5.
    """
    cells = [
        {
            "name": "A > 0, π 0.00-0.25",
            "tokens": 30,
            "logit_share": 0.5,
            "found": "agrees",
            "share": 0.6,
            "cosine": cosine,
        },
        {"name": "A > 0, π 0.25-0.50", "tokens": 70, "logit_share": 0.5, "found": "no gradient"},
    ]
    methods = {
        name: {"lowers": "noise" if move > 0 else "signal", "agreeing_before": 0.5, "agreeing_after": 0.5 + move}
        for name, move in moves.items()
    }
    return {"whole": {"cosine": cosine}, "cells": cells, "methods": methods}


def store(path, found: dict[tuple[str, int], dict]) -> None:
    for (by, seed), value in found.items():
        stored.write({"condition": runs.NOISE, "seed": seed, "by": by} | value, path)


def lines_of(results: dict[str, dict], folder: Path) -> list[list[list[str]]]:
    """Return the lines of the three CSV files: cells, methods, correlations."""
    return list(validation.files(results, folder / stored.AGREEMENT).values())


def test_a_method_s_share_in_cells_that_agree_is_held_against_its_accuracy(tmp_path):
    results = {
        f"noise-{name}-{seed}": result(of_name(f"noise-{name}-{seed}"), value)
        for name, value in {"grpo": 0.5, "ar": 0.53, "direction": 0.46, "steer": 0.51}.items()
        for seed in (0, 1)
    }
    moves = [
        {"ar": 0.02, "ar alpha=-0.2 (Direction)": -0.01, "steer": 0.03},
        {"ar": 0.04, "ar alpha=-0.2 (Direction)": 0.006, "steer": 0.05},
    ]
    store(tmp_path / stored.AGREEMENT, {("probability", 0): asked(moves[0]), ("probability", 1): asked(moves[1], 0.6)})
    store(tmp_path / stored.AGREEMENT, {("entropy", 1): asked({"ar": -0.01, "steer": 0.0})})
    cells, methods, together = lines_of(results, tmp_path)
    half = "0.50 ± 1.27"  # 12.706 · 0.1
    known = ["0.300 ± 0.000", "0.600 ± 0.000", half, "agrees"]
    assert ["noise", "probability", "A > 0, π 0.00-0.25", "2", *known] in cells
    nothing = ["missing", "missing", "no gradient"]
    assert ["noise", "probability", "A > 0, π 0.25-0.50", "2", "0.700 ± 0.000", *nothing] in cells
    zero = "+0.000 ± 0.000"
    assert ["noise", "AR (α = 0.3)", "noise", "+0.030", "signal", "-0.010", "+0.030 ± 0.000", zero] in methods
    of_both = ["signal 1, noise 1", "-0.002", "", "", "-0.040 ± 0.000", zero]
    assert ["noise", "Direction (α = -0.2)", *of_both] in methods
    assert ["noise", "A3PO", "", "", "", "", "missing", "missing"] in methods
    # Ranks 2, 1, 3 and 3, 1, 2: ρ = 1 − 6 · 2 / (3 · 8). Of six orders none but the middle pair has less than 0.5. The
    # rewards are all equal.
    assert ["noise", "probability", "3", "0, 1", "+0.50 (p 1.00)", "not known", half] in together
    assert ["noise", "entropy", "2", "1", "not known", "not known", "0.40"] in together


def test_accuracy_is_that_of_the_seeds_that_were_judged(tmp_path):
    """AR gains in seed 0, which alone was asked, and loses more in seed 1."""
    gains = {"ar": (0.02, -0.2), "direction": (0.01, 0.1), "steer": (0.0, 0.1)}
    results = {f"noise-grpo-{seed}": result(of_name(f"noise-grpo-{seed}"), 0.5) for seed in (0, 1)}
    for name, of_seeds in gains.items():
        for seed, gain in enumerate(of_seeds):
            results[f"noise-{name}-{seed}"] = result(of_name(f"noise-{name}-{seed}"), 0.5 + gain)
    moves = {"ar": 0.03, "ar alpha=-0.2 (Direction)": 0.02, "steer": 0.01}
    store(tmp_path / stored.AGREEMENT, {("probability", 0): asked(moves), ("probability", 1): asked({})})
    *_, together = lines_of(results, tmp_path)
    assert ["noise", "probability", "3", "0", "+1.00 (p 0.33)", "not known", "0.40 ± 0.00"] in together
    assert ["noise", "entropy", "0", "none", "not known", "not known", "missing"] in together


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [10, 20, 90], "+1.00 (p 0.33)"),  # two of six orders, this and the reverse
        ([1, 2, 3, 4], [4, 3, 2, 1], "-1.00 (p 0.08)"),  # two of 24
        # Ranks 1.5, 1.5, 3 and 1, 2, 3: 1.5 / √(1.5 · 2). Four of six orders have the 3 or the 1 in the last place.
        ([1, 1, 2], [1, 2, 3], "+0.87 (p 0.67)"),
        ([1, 2], [1, 2], "not known"),
        ([1, 2, 3], [5, 5, 5], "not known"),
    ],
)
def test_rank_correlation(first, second, expected):
    assert validation.rank_correlation(first, second) == expected


def test_the_tables_say_what_is_missing(tmp_path):
    store(tmp_path / stored.AGREEMENT, {("probability", 3): asked({"ar": 0.01})})
    cells, methods, together = lines_of({}, tmp_path)
    assert {line[0] for line in cells[1:]} == {runs.NOISE}
    assert ["noise", "AR (α = 0.3)", "noise", "+0.010", "", "", "missing", "missing"] in methods
    assert ["decisions", "probability", "0", "none", "not known", "not known", "missing"] in together
