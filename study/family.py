"""Write the tables of the study of the family: each condition, both controls, one correction for all comparisons."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study import runs, validation
from study.comparison import TITLES, Row, accuracy, differences, rows_of
from study.significance import PairedTest, holm
from study.tables import (
    Table,
    accuracy_table,
    cell,
    difference,
    difference_head,
    difference_line,
    origin,
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


def tables(
    results: dict[str, dict], again: dict[str, dict], later: dict[str, dict], agreement: Path
) -> tuple[str, dict[str, Table]]:
    """Return the whole generated part of docs/study_family.md, and the tables that are too long for a page.

    Those are {name of a CSV file in study/results: table}. The page has links to them.

    Args:
        results: of the runs that are done, by name.
        again: those of `runs.FAMILY_CONTROLS` on puzzles held out by structure.
        later: those of `runs.NEXT`, on such puzzles too.
        agreement: the file of what `study.warm_start_agreement` found.
    """
    parts = [f"**{_progress(runs.FAMILY, results)}.**\n", _setting()]
    files: dict[str, Table] = {}
    corrected = dict(zip(COMPARISONS, corrected_p(results), strict=True))
    for condition in runs.CONDITIONS:
        rows = {name: _row(condition, name, results) for name in runs.FAMILY_VARIANTS}
        parts += [f"## Condition: {condition}\n", _low_share(rows["grpo"])]
        lines = [difference_head("accuracy minus")]
        for comparison, p in corrected.items():
            if comparison.condition == condition:
                row, baseline = rows[comparison.name], rows[comparison.baseline]
                title = f"{TITLES[row.name]} minus {TITLES[baseline.name]}"
                lines.append(difference_line(title, row, baseline, p))
        for title, name, table in (
            ("Accuracy on held-out puzzles", "accuracy", accuracy_table(list(rows.values()))),
            ("Differences in accuracy, with p", "differences", lines),
            ("Time and stability", "stability", stability_table(list(rows.values()))),
        ):
            file = f"family_{condition}_{name}.csv"
            files[file] = table
            parts.append(f"{title}: [{len(table) - 1} rows](../study/results/{file}).\n")
        parts.append(_weights_table(list(rows.values())))
    parts.append("## Agreement before training, and training\n")
    parts += [validation.tables(condition, results, agreement) for condition in runs.CONDITIONS]
    parts += [*_by_structure(results, again), *_later(later)]
    parts.append(origin([*results.values(), *again.values(), *later.values()]))
    return "\n".join(parts), files


def _by_structure(results: dict[str, dict], again: dict[str, dict]) -> list[str]:
    """Return what came out on puzzles held out by structure, beside what came out before."""
    parts = [f"## Held out by structure\n\n**{_progress(runs.FAMILY_CONTROLS, again)}.**\n"]
    corrected = dict(zip(REPEATED, corrected_p(again, REPEATED), strict=True))
    for condition in runs.CONDITIONS:
        accuracies = accuracy_table([_row(condition, name, again) for name in runs.CONTROLS])
        parts += [f"### {condition}\n", markdown_table(accuracies)]
        lines = [difference_head("accuracy minus")]
        for comparison in (c for c in REPEATED if c.condition == condition):
            for split, found in (("as told", results), ("by structure", again)):
                row, baseline = (_row(condition, name, found) for name in comparison[1:])
                title = f"{TITLES[row.name]} minus {TITLES[baseline.name]}, {split}"
                p = corrected[comparison] if found is again else math.nan
                lines.append(difference_line(title, row, baseline, p))
        parts.append(markdown_table(lines))
    return parts


def _later(later: dict[str, dict]) -> list[str]:
    """Return what came out with the methods that came later."""
    parts = [f"## CW-GRPO and GMTS\n\n**{_progress(runs.NEXT, later)}.**\n"]
    corrected = dict(zip(LATER, corrected_p(later, LATER), strict=True))
    for condition in runs.CONDITIONS:
        rows = {name: _row(condition, name, later) for name in runs.NEXT_VARIANTS}
        lines = [difference_head("accuracy minus")]
        for comparison in (c for c in LATER if c.condition == condition):
            row, baseline = rows[comparison.name], rows[comparison.baseline]
            title = f"{TITLES[row.name]} minus {TITLES[baseline.name]}"
            lines.append(difference_line(title, row, baseline, corrected[comparison]))
        found = list(rows.values())
        tables_of = (accuracy_table(found), lines, stability_table(found))
        parts += [f"### {condition}, later methods\n", *map(markdown_table, tables_of)]
    return parts


def short_table(results: dict[str, dict], later: dict[str, dict]) -> str:
    """Return each method's accuracy minus GRPO's in both conditions, for the index of the methods."""
    seeds = len({run.seed for run in runs.FAMILY})
    lines = [["accuracy minus GRPO's", *(f"{condition} (seeds)" for condition in runs.CONDITIONS)]]
    first = [name for name in runs.FAMILY_VARIANTS if not name.endswith("-mean-one")]
    for found, names in (results, first), (later, runs.NEXT_VARIANTS):
        for name in names:
            if name != "grpo":
                line = [TITLES[f"{runs.DECISIONS}-{name}"]]
                for condition in runs.CONDITIONS:
                    test = compare(Comparison(condition, name, "grpo"), found)
                    line.append(f"{difference(test)} ({test.difference.n if test else 0} of {seeds})")
                lines.append(line)
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


def _row(condition: str, name: str, results: dict[str, dict]) -> Row:
    return rows_of([f"{condition}-{name}"], results)[0]


def _progress(planned: Sequence[runs.Run], results: dict[str, dict]) -> str:
    """Return how many runs are done, of both conditions together, also of each seed."""
    seeds = sorted({run.seed for run in planned})
    counts = {seed: [run.name in results for run in planned if run.seed == seed] for seed in seeds}
    of_seeds = ", ".join(f"seed {seed}: {sum(done)} of {len(done)}" for seed, done in counts.items())
    return f"{sum(map(sum, counts.values()))} of {len(planned)} runs are done ({of_seeds})"


def _setting() -> str:
    limits = ", ".join(f"{c.max_new_tokens} ({name})" for name, c in runs.CONDITIONS.items())
    return (
        f"Puzzles, steps, evaluation and learning rate are those of docs/study.md. The answers have at most so many "
        f"tokens: {limits}. p (Holm) is corrected for the {len(COMPARISONS)} comparisons of both conditions, of which "
        "those that cannot be tested yet count with p = 1. The share of p < 0.5 and the entropy are known of the "
        "tokens that are trained, so a method that leaves out more than one in a hundred has none.\n"
    )


def _low_share(grpo: Row) -> str:
    """Return a sentence on how many tokens are rare at the start."""
    first = [r["curves"]["low_share"][0] for r in grpo.results.values()]
    return f"Share of tokens with π_old < 0.5 in GRPO's first two steps: {cell(first)}.\n"


def _weights_table(rows: list[Row]) -> str:
    """Return each method's own weights, as means over steps and seeds, before a mean of one is made of them."""
    lines = [["the method's own weights", "seeds", "mean weight", "share of weight 0"]]
    for row in rows:
        found = [r["curves"] for r in row.results.values()]
        if found and all("mean_weight" in curves for curves in found):
            means = [[fmean(curves[name]) for curves in found] for name in ("mean_weight", "zero_share")]
            lines.append([TITLES[row.name], f"{len(found)} of {row.planned}", *map(cell, means)])
    return markdown_table(lines)
