"""Arrange the results by variant and seed, and compare each variant with its baseline."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from study import runs
from study.significance import PairedTest, paired_test

TITLES = {
    "grpo": "GRPO",
    "ar": "+ AR (α = 0.3)",
    "lopti": "+ Lopti (η = 0.5)",
    "both": "+ AR + Lopti",
    runs.CONTROL: "GRPO, twice as many steps",
    "high-first": "Lopti, high group first",
    "only-low": "low group only",
    "only-high": "high group only",
    "alpha-0.1": "AR, α = 0.1",
    "alpha-1": "AR, α = 1",
    "eta-0.3": "Lopti, η = 0.3",
    "eta-0.7": "Lopti, η = 0.7",
    "rpp": "REINFORCE++",
    "rpp-ar": "+ AR (α = 0.1)",
    "rpp-lopti": "+ Lopti (η = 0.5)",
    "rpp-both": "+ AR + Lopti",
}
_METHODS = {
    "ar": "AR (α = 0.3)",
    "direction": "Direction (α = -0.2)",
    "a3po": "A3PO",
    "stare": "STARE",
    "steer": "STEER",
}
_FAMILY = {
    "grpo": "GRPO",
    runs.CONTROL: "GRPO, twice as many steps",
    "lopti": "Lopti (η = 0.5)",
    "eighty-twenty": "80/20",
    "stapo": "STAPO",
    **_METHODS,
    **{f"{name}-mean-one": f"{title}, mean weight one" for name, title in _METHODS.items()},
    "cw-grpo": "CW-GRPO",
    "gmts": "GMTS",
}
TITLES |= {f"{condition}-{name}": title for condition in runs.CONDITIONS for name, title in _FAMILY.items()}
SOURCES = [f"kk_{people}ppl" for people in runs.PEOPLE]
PASS = f"pass@{runs.EVAL_SAMPLES}"


class Row(NamedTuple):
    """Holds the results of one variant by seed. `planned` is the number of seeds that the study has for it."""

    name: str
    results: dict[int, dict]
    planned: int


def rows_of(variants: Sequence[str], results: dict[str, dict]) -> list[Row]:
    """Return the variants' rows, those without a result too."""
    rows = []
    for variant in variants:
        planned = [run for run in dict.fromkeys((*runs.STUDY, *runs.FAMILY, *runs.NEXT)) if run.variant == variant]
        found = {run.seed: results[run.name] for run in planned if run.name in results}
        rows.append(Row(variant, found, len(planned)))
    return rows


def average(evaluation: dict, measure: str) -> float:
    """Return a measure of one evaluation, as a mean over the numbers of people."""
    return fmean(evaluation[source][measure][0] for source in SOURCES)


def accuracy(result: dict, sources: Sequence[str] = SOURCES) -> float:
    """Return sampled accuracy after training, as a mean over the numbers of people."""
    return fmean(result["after"][source]["accuracy"][0] for source in sources)


def mean_reward(result: dict) -> float:
    """Return the mean reward of all rollouts, which is higher for a run that learns sooner."""
    return fmean(math.nan if value is None else value for value in result["curves"]["reward"])


def differences(row: Row, baseline: Row, measure: Callable[[dict], float]) -> PairedTest | None:
    """Test a result's measure against the baseline's, between runs of one seed and one warm start.

    Another kind of machine may make another warm start from a seed, so its hash is part of the key.
    """

    def by_pair(of: Row) -> dict[tuple, float]:
        return {(seed, r["warm_start_sha256"]): measure(r) for seed, r in of.results.items()}

    return paired_test(by_pair(row), by_pair(baseline))
