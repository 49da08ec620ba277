"""Make the tables of the study of the family: each condition, both controls, one correction for all comparisons."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study import runs
from study.comparison import TITLES, Row, accuracy, differences, rows_of
from study.significance import PairedTest, holm
from study.tables import (
    Table,
    accuracy_table,
    cell,
    difference,
    difference_head,
    difference_line,
    joined,
    p_value,
    stability_table,
)


class Comparison(NamedTuple):
    """Names what is compared with what in one of `runs.CONDITIONS`."""

    condition: str
    name: str  # of `runs.FAMILY_VARIANTS`
    baseline: str


# Everything with GRPO, and Lopti with what takes as many optimizer steps.
COMPARISONS = [
    Comparison(condition, name, baseline)
    for condition in runs.CONDITIONS
    for name, baseline in [*((n, "grpo") for n in runs.FAMILY_VARIANTS if n != "grpo"), ("lopti", runs.CONTROL)]
]
LATER = [
    Comparison(condition, name, "grpo")
    for condition in runs.CONDITIONS
    for name in runs.NEXT_VARIANTS
    if name != "grpo"
]
REPEATED = [c for c in COMPARISONS if {c.name, c.baseline} <= set(runs.CONTROLS)]


def files(results: dict[str, dict], again: dict[str, dict], later: dict[str, dict]) -> dict[str, Table]:
    """Return the tables by the names of their CSV files.

    Args:
        results: of the runs that are done, by name.
        again: those of `runs.FAMILY_CONTROLS` on puzzles held out by structure.
        later: those of `runs.NEXT`, on such puzzles too.
    """
    return {
        **_files("family", runs.FAMILY_VARIANTS, COMPARISONS, results),
        "family_weights.csv": joined("condition", {c: _weights_table(c, results) for c in runs.CONDITIONS}),
        **_files("by_structure", runs.CONTROLS, REPEATED, again),
        **_files("next", runs.NEXT_VARIANTS, LATER, later),
    }


def _files(
    prefix: str, variants: Sequence[str] | Mapping[str, str], comparisons: list[Comparison], results: dict[str, dict]
) -> dict[str, Table]:
    rows = {c: [_row(c, name, results) for name in variants] for c in runs.CONDITIONS}
    compared: dict[str, Table] = {c: [difference_head("accuracy minus")] for c in runs.CONDITIONS}
    for comparison, p in zip(comparisons, corrected_p(results, comparisons), strict=True):
        row, baseline = (_row(comparison.condition, name, results) for name in comparison[1:])
        compared[comparison.condition].append(difference_line(_title(comparison), row, baseline, p))
    tables = {
        "accuracy": {c: accuracy_table(of_condition) for c, of_condition in rows.items()},
        "differences": compared,
        "stability": {c: stability_table(of_condition) for c, of_condition in rows.items()},
    }
    return {f"{prefix}_{name}.csv": joined("condition", by_condition) for name, by_condition in tables.items()}


def methods_table(results: dict[str, dict], later: dict[str, dict]) -> str:
    """Return each method's accuracy minus GRPO's in both conditions, for a page."""
    with_p = {
        comparison: (difference(compare(comparison, found)), p_value(p))
        for found, comparisons in ((results, COMPARISONS), (later, LATER))
        for comparison, p in zip(comparisons, corrected_p(found, comparisons), strict=True)
    }
    head = chain.from_iterable((condition, "p (Holm)") for condition in runs.CONDITIONS)
    lines = [["accuracy minus GRPO's", *head]]
    for name in (name for name in (*runs.FAMILY_VARIANTS, *runs.NEXT_VARIANTS) if name != "grpo"):
        if not name.endswith("-mean-one"):
            cells = chain.from_iterable(with_p[Comparison(condition, name, "grpo")] for condition in runs.CONDITIONS)
            lines.append([TITLES[f"{runs.DECISIONS}-{name}"], *cells])
    return markdown_table(lines)


def corrected_p(results: dict[str, dict], comparisons: Sequence[Comparison] = COMPARISONS) -> list[float]:
    """Return the p-value of each comparison with Holm's correction for all of them; nan where there is none.

    One that cannot be tested yet counts with p = 1, so an unfinished study is corrected for as many as a finished one.
    """
    tests = [compare(comparison, results) for comparison in comparisons]
    p_values = [test.p if test else math.nan for test in tests]
    corrected = holm([1.0 if math.isnan(p) else p for p in p_values])
    return [math.nan if math.isnan(p) else c for p, c in zip(p_values, corrected, strict=True)]


def compare(comparison: Comparison, results: dict[str, dict]) -> PairedTest | None:
    """Test a comparison's difference in accuracy; None where no seed has both."""
    row, baseline = (_row(comparison.condition, name, results) for name in comparison[1:])
    return differences(row, baseline, accuracy)


def _title(comparison: Comparison) -> str:
    name, baseline = (TITLES[f"{comparison.condition}-{name}"] for name in comparison[1:])
    return f"{name} minus {baseline}"


def _row(condition: str, name: str, results: dict[str, dict]) -> Row:
    return rows_of([f"{condition}-{name}"], results)[0]


def _weights_table(condition: str, results: dict[str, dict]) -> Table:
    """Return each method's own weights, as means over steps and seeds, before a mean of one is made of them."""
    lines = [["the method's own weights", "seeds", "mean weight", "share of weight 0"]]
    for row in (_row(condition, name, results) for name in runs.FAMILY_VARIANTS):
        found = [r["curves"] for r in row.results.values()]
        if found and all("mean_weight" in curves for curves in found):
            means = [[fmean(curves[name]) for curves in found] for name in ("mean_weight", "zero_share")]
            lines.append([TITLES[row.name], f"{len(found)} of {row.planned}", *map(cell, means)])
    return lines
