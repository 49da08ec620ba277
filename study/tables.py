"""Make the studies' tables: accuracy, differences to the baselines, time and stability, the learning rates tried."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study import runs
from study.comparison import PASS, SOURCES, TITLES, Row, accuracy, average, differences, mean_reward, rows_of
from study.significance import PairedTest, holm, interval

Table = list[list[str]]  # the first line is its head
LEFT_OUT = 0.01  # a run that leaves out a greater share of its tokens has no statistics of all tokens
ABLATIONS, REINFORCE = "ablations", "REINFORCE++"
# The first study's comparisons, each with its baseline first. Holm's correction is for one of them at a time.
_SECTIONS = {
    "GRPO": list(runs.GRPO),
    ABLATIONS: ["grpo", runs.CONTROL, *runs.ABLATIONS],
    REINFORCE: list(runs.REINFORCE),
}
_MINUS = "minus the baseline's"


def files(results: dict[str, dict]) -> dict[str, Table]:
    """Return the first study's tables by the names of their CSV files."""
    sections = {title: _rows(title, results) for title in _SECTIONS}
    makers = {"accuracy": accuracy_table, "differences": difference_table, "stability": stability_table}
    found = {
        f"ar_lopti_{name}.csv": joined("runs", {title: make(rows) for title, rows in sections.items()})
        for name, make in makers.items()
    }
    return found | {"ar_lopti_learning_rates.csv": tuning_table(results)}


def variants_table(results: dict[str, dict]) -> str:
    """Return accuracy of GRPO and the two methods, and their differences to GRPO, for the page."""
    rows = _rows("GRPO", results)
    measured = columns(accuracy_table(rows), "held out, after training", "average", "greedy", PASS)
    compared = {line[0]: line[1:] for line in columns(difference_table(rows), _MINUS, "accuracy", "p (Holm)")}
    lines = [["held out, after training", "accuracy", "greedy", PASS, "accuracy minus GRPO's", "p (Holm)"]]
    return markdown_table(lines + [[*line, *compared.get(line[0], ["", ""])] for line in measured[1:]])


def ablations_table(results: dict[str, dict]) -> str:
    """Return the differences of the ablations and of REINFORCE++'s variants, for the page."""
    found = {
        title: columns(difference_table(_rows(title, results)), _MINUS, "accuracy", "p", "p (Holm)")
        for title in (ABLATIONS, REINFORCE)
    }
    return markdown_table(joined("runs", found))


def _rows(section: str, results: dict[str, dict]) -> list[Row]:
    """Return the rows of a section. All have the seeds that its other variants were planned with."""
    rows = rows_of(_SECTIONS[section], results)
    planned = rows[1].planned
    of_seeds = {seed: result for seed, result in rows[0].results.items() if seed < planned}
    return [rows[0]._replace(planned=planned, results=of_seeds), *rows[1:]]


def joined(title: str, tables: Mapping[str, Table]) -> Table:
    """Return tables with the same columns as one, whose first column says which of them a line is from."""
    head = next((table[0] for table in tables.values() if table), [])
    return [[title, *head], *([name, *line] for name, table in tables.items() for line in table[1:])]


def columns(table: Table, *names: str) -> Table:
    """Return some columns of a table."""
    places = [table[0].index(name) for name in names]
    return [[line[place] for place in places] for line in table]


def cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean ± half-width of the values of seeds, of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return "-" if values else "missing"
    found = interval(known)
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.half) else f" ± {found.half:.{digits}f}")


def accuracy_table(rows: Sequence[Row]) -> Table:
    """Return sampled accuracy by number of people, then greedy, pass@k and reward, as mean ± 95% over seeds."""
    head = ["held out, after training", "seeds", *(f"{people} people" for people in runs.PEOPLE)]
    lines = [[*head, "average", "± by puzzle", "greedy", PASS, "reward over training"]]
    baseline = rows[0]
    entries = [("warm start", "before", baseline), *((TITLES[row.name], "after", row) for row in rows)]
    for title, when, row in entries:
        found = [result[when] for result in row.results.values()]
        lines.append(
            [title, f"{len(found)} of {row.planned}"]
            + [cell([measured[source]["accuracy"][0] for measured in found]) for source in SOURCES]
            + [cell([average(measured, "accuracy") for measured in found])]
            + [f"{_by_puzzle(found):.3f}" if found else "missing"]
            + [cell([average(measured, measure) for measured in found]) for measure in ("greedy", PASS)]
            + ["" if when == "before" else cell([mean_reward(r) for r in row.results.values()])]
        )
    return lines


def _by_puzzle(found: Sequence[dict]) -> float:
    """Return the half-width of the average's interval, had only puzzles and answers varied; clustered by puzzle."""
    halves = [(m[s]["accuracy"][2] - m[s]["accuracy"][1]) / 2 for m in found for s in SOURCES]
    return math.sqrt(sum(half**2 for half in halves)) / len(halves)


def difference_table(rows: Sequence[Row]) -> Table:
    """Return the differences to the baseline, paired by seed."""
    baseline, others = rows[0], rows[1:]
    tests = [differences(row, baseline, accuracy) for row in others]
    corrected = holm([test.p if test else math.nan for test in tests])
    lines = [difference_line(TITLES[row.name], row, baseline, p) for row, p in zip(others, corrected, strict=True)]
    return [difference_head(_MINUS), *lines]


def difference_head(title: str) -> list[str]:
    """Return the heads of the columns of `difference_line`."""
    return [title, "pairs", "accuracy", "p", "p (Holm)", *_further_measures()]


def difference_line(title: str, row: Row, baseline: Row, corrected: float) -> list[str]:
    """Return the differences between two rows, paired by seed.

    Args:
        title: of the line.
        row: what is compared.
        baseline: with what.
        corrected: the p-value of the accuracy's difference, corrected; nan where there is none.
    """
    test = differences(row, baseline, accuracy)
    cells = [difference(test), p_value(test.p if test else math.nan), p_value(corrected)]
    cells += [difference(differences(row, baseline, measure)) for measure in _further_measures().values()]
    return [title, f"{test.difference.n if test else 0} of {row.planned}", *cells]


def _further_measures() -> dict[str, Callable[[dict], float]]:
    """Return the measures of a result beside accuracy, by their columns' heads."""
    further: dict[str, Callable[[dict], float]] = {
        f"{people} people": partial(accuracy, sources=[source])
        for people, source in zip(runs.PEOPLE, SOURCES, strict=True)
    }
    further |= {name: partial(_average_after, measure=name) for name in ("greedy", PASS)}
    further["reward over training"] = mean_reward
    return further


def _average_after(result: dict, measure: str) -> float:
    return average(result["after"], measure)


def difference(test: PairedTest | None) -> str:
    """Return a difference and the half-width of its 95% interval."""
    if test is None:
        return "missing"
    mean, half, n = test.difference
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if n > 1 else "")


def p_value(p: float) -> str:
    """Return a p-value, or nothing where there is none."""
    return "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def stability_table(rows: Sequence[Row]) -> Table:
    """Return time and stability, as means over seeds."""
    head = [
        "time and stability",
        "seeds",
        "collapses",
        "gradient norm: median",
        "max",
        "share of p < 0.5, first",
        "share of p < 0.5, last",
        "entropy, last",
        "tokens, last",
    ]
    lines = [[*head, "s per step", "s per update", "min per run"]]
    statistics = (("low_share", 0), ("low_share", -1), ("entropy", -1))
    for row in rows:
        found = list(row.results.values())
        if not found:
            lines.append([TITLES[row.name], f"0 of {row.planned}", *["missing"] * (len(lines[0]) - 2)])
            continue
        lines.append(
            [
                TITLES[row.name],
                f"{len(found)} of {row.planned}",
                f"{sum(r['collapsed'] for r in found)} of {len(found)}",
            ]
            + [_norms(found, name) for name in ("median", "max")]
            + [cell([_of_all_tokens(r, name, when) for r in found]) for name, when in statistics]
            + [cell([r["curves"]["response_length"][-1] for r in found], 1)]
            + [cell([r["seconds"][name] for r in found], 2) for name in ("step", "update")]
            + [cell([r["seconds"]["run"] / 60 for r in found], 1)]
        )
    return lines


def _of_all_tokens(result: dict, name: str, when: int) -> float | None:
    """Return the value of a statistic of all tokens at one point of its curve; None if the run has none.

    The statistics by probability describe the tokens that are trained. A method may leave out most of the others.
    """
    curves = result["curves"]
    leaves_out = fmean(curves.get("zero_share", [0.0])) > LEFT_OUT
    return None if leaves_out or name not in curves else curves[name][when]


def _norms(found: Sequence[dict], measure: str) -> str:
    """Return the gradient's norm; with Lopti, each stage's."""
    stages = {"grad_norm": "", "grad_norm_low": "low ", "grad_norm_high": "high "}
    cells = [title + cell([r[name][measure] for r in found], 2) for name, title in stages.items() if name in found[0]]
    return ", ".join(cells)


def tuning_table(results: dict[str, dict]) -> Table:
    """Return GRPO's accuracy at each learning rate."""
    lines = [["learning rate", "seeds", "accuracy before", "after", "greedy", PASS, "collapses"]]
    for rate in runs.LEARNING_RATES:
        planned = [run for run in runs.TUNING if run.learning_rate == rate]
        found = [results[run.name] for run in planned if run.name in results]
        cells = [cell([average(r["before"], "accuracy") for r in found])]
        cells += [cell([average(r["after"], measure) for r in found]) for measure in ("accuracy", "greedy", PASS)]
        chosen = " (taken)" if rate == runs.LEARNING_RATE else ""
        collapses = f"{sum(r['collapsed'] for r in found)} of {len(found)}"
        lines.append([f"{rate:g}{chosen}", f"{len(found)} of {len(planned)}", *cells, collapses])
    return lines
