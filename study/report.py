"""Tables and picture of the study from study/results, as far as the runs are done.

    python -m study.report    # into docs/study.md, between its two marks, and docs/study.png

Every interval is a 95% interval. Over seeds it is Student's, n - 1 degrees of freedom; the tests are paired by seed,
since runs of one seed share the warm start, the puzzles and their order.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import mpmath

from study import runs
from study.run import RESULTS, load
from study.runs import ROOT

START, END = "<!-- tables: python -m study.report -->", "<!-- end of tables -->"
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
SOURCES = [f"kk_{people}ppl" for people in runs.PEOPLE]
PASS = f"pass@{runs.EVAL_SAMPLES}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m study.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of study.md and study.png")
    args = parser.parse_args()
    results = load([*runs.STUDY, *runs.TUNING], args.results)
    page = args.docs / "study.md"
    text = page.read_text("utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        parser.error(f"{page}: needs the lines {START} and {END}, once each")
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{tables(results)}\n{END}{after}", "utf-8")
    picture(results, args.docs / "study.png")
    print(f"{len(results)} of {len(runs.STUDY) + len(runs.TUNING)} runs: {page}")


# --- statistics ----------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean over seeds and the half-width of its 95% interval; nan with a single seed."""

    mean: float
    half: float
    n: int


class Test(NamedTuple):
    """Differences to the baseline, paired by seed, and the two-sided p of Student's paired test."""

    difference: Interval
    p: float


def t_tail(t: float, degrees: int) -> float:
    """P(|T| > |t|) of Student's t: the regularized incomplete beta function I_{ν / (ν + t²)}(ν / 2, 1 / 2)."""
    return float(mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True))


def t_quantile(degrees: int) -> float:
    """The t with P(|T| > t) = 0.05."""
    return float(mpmath.findroot(lambda t: t_tail(t, degrees) - 0.05, (1.9, 13), solver="anderson"))


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95% half-width of independent values, one per seed; nan if one of them is not finite."""
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, n)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Interval(fmean(values), half, n)


def paired_test(values: dict, baseline: dict) -> Test | None:
    """The test over the keys that both have; None where there is none.

    Args:
        values: by seed, or whatever makes a pair.
        baseline: the same.
    """
    differences = [values[key] - baseline[key] for key in sorted(values.keys() & baseline.keys())]
    if not differences:
        return None
    found = interval(differences)
    if found.n < 2 or math.isnan(found.mean):
        return Test(found, math.nan)
    error = stdev(differences) / math.sqrt(found.n)
    if not error:
        return Test(found, 1.0 if not found.mean else 0.0)
    return Test(found, t_tail(found.mean / error, found.n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for testing several hypotheses; a nan counts as no test."""
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


# --- tables --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The results of one variant by seed, of `planned` seeds."""

    name: str
    baseline: str
    results: dict[int, dict]
    planned: int


def rows_of(variants: Sequence[str], results: dict[str, dict]) -> list[Row]:
    """The variants' rows, those without a result too."""
    rows = []
    for variant in variants:
        planned = [run for run in runs.STUDY if run.variant == variant]
        found = {run.seed: results[run.name] for run in planned if run.name in results}
        rows.append(Row(variant, runs.BASELINE[planned[0].family], found, len(planned)))
    return rows


def tables(results: dict[str, dict]) -> str:
    """The whole generated part of docs/study.md."""
    parts = [setting()]
    sections = (
        ("GRPO", list(runs.GRPO)),
        ("Ablations (Section 5.3)", ["grpo", runs.CONTROL, *runs.ABLATIONS]),
        ("REINFORCE++ (Appendix D)", list(runs.REINFORCE)),
    )
    for title, variants in sections:
        rows = rows_of(variants, results)
        # The ablations have fewer seeds: beside them the baseline is that of the same seeds.
        if title.startswith("Ablations"):
            planned = rows[1].planned
            rows[0] = rows[0]._replace(
                planned=planned, results={seed: r for seed, r in rows[0].results.items() if seed < planned}
            )
        parts += [f"## {title}\n", accuracy_table(rows), difference_table(rows), stability_table(rows)]
    parts += ["## The learning rate, chosen for GRPO alone\n", tuning_table(results)]
    missing = [run.name for run in [*runs.STUDY, *runs.TUNING] if run.name not in results]
    parts.append(f"Runs that are missing: {', '.join(missing) or 'none'}.\n")
    machines = sorted({_machine(r["machine"]) for r in results.values()})
    parts.append(f"Run on: {'; '.join(machines) or 'nothing yet'}.\n")
    parts.append(f"At the commits: {', '.join(sorted({r['commit'] for r in results.values()}))}.\n")
    return "\n".join(parts)


def _machine(machine: dict) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, runs at a time: {machine['parallel']}"


def setting() -> str:
    """What every run has in common, from the runs' own figures."""
    people = " and ".join(map(str, runs.PEOPLE))
    warm_start = ", ".join(f"{name} {value}" for name, value in runs.WARM_START.items())
    return (
        f"Puzzles of {people} people, equally often; held out, by structure: {runs.HELD_OUT} for each number of "
        f"people, answered {runs.EVAL_SAMPLES} times at temperature {runs.TEMPERATURE}, and {runs.HELD_OUT_GREEDY} "
        f"others, answered greedily. Warm start ({warm_start}), one per seed, shared by the seed's runs. Then "
        f"{runs.STEPS} steps of {runs.PROMPTS_PER_STEP} puzzles x {runs.SAMPLES_PER_PROMPT} answers of at most "
        f"{runs.MAX_NEW_TOKENS} tokens at temperature {runs.TEMPERATURE}, the same puzzles in the same order for all; "
        "two mini-batches a step, each an optimizer step, and two with Lopti; learning rate "
        f"{runs.LEARNING_RATE:g}, constant. `study/runs.py` has every flag.\n"
    )


def _average(measured: dict, measure: str) -> float:
    """Mean over the numbers of people."""
    return fmean(measured[source][measure][0] for source in SOURCES)


def _cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean ± half-width, of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return "-" if values else "missing"
    found = interval(known)
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.half) else f" ± {found.half:.{digits}f}")


def accuracy_table(rows: Sequence[Row]) -> str:
    """Sampled accuracy by number of people, then greedy, pass@k and reward, as mean ± 95% over seeds."""
    head = ["held out, after training", "seeds", *(f"{people} people" for people in runs.PEOPLE)]
    lines = [[*head, "average", "± by puzzle", "greedy", PASS, "reward over training"]]
    baseline = rows[0]
    entries = [("warm start", "before", baseline), *((TITLES[row.name], "after", row) for row in rows)]
    for title, when, row in entries:
        found = [result[when] for result in row.results.values()]
        lines.append(
            [title, f"{len(found)} of {row.planned}"]
            + [_cell([measured[source]["accuracy"][0] for measured in found]) for source in SOURCES]
            + [_cell([_average(measured, "accuracy") for measured in found])]
            + [f"{_by_puzzle(found):.3f}" if found else "missing"]
            + [_cell([_average(measured, measure) for measured in found]) for measure in ("greedy", PASS)]
            + ["" if when == "before" else _cell([mean_reward(r) for r in row.results.values()])]
        )
    return _table(lines)


def _by_puzzle(found: Sequence[dict]) -> float:
    """Half-width of the average's interval if only the choice of puzzles and answers varied: clustered by puzzle."""
    halves = [(m[s]["accuracy"][2] - m[s]["accuracy"][1]) / 2 for m in found for s in SOURCES]
    return math.sqrt(sum(half**2 for half in halves)) / len(halves)


def differences(row: Row, baseline: Row, measure: Callable[[dict], float]) -> Test | None:
    """The test of a result's measure against the baseline's, between runs of one seed and one warm start.

    Another kind of machine may make another warm start from a seed: its hash is part of the key.
    """

    def by_pair(of: Row) -> dict[tuple, float]:
        return {(seed, r["warm_start_sha256"]): measure(r) for seed, r in of.results.items()}

    return paired_test(by_pair(row), by_pair(baseline))


def accuracy(result: dict, sources: Sequence[str] = SOURCES) -> float:
    """Sampled accuracy after training, a mean over the numbers of people."""
    return fmean(result["after"][source]["accuracy"][0] for source in sources)


def difference_table(rows: Sequence[Row]) -> str:
    """Differences to the baseline, paired by seed."""
    baseline, others = rows[0], rows[1:]
    further: dict[str, Callable[[dict], float]] = {
        f"{people} people": partial(accuracy, sources=[source])
        for people, source in zip(runs.PEOPLE, SOURCES, strict=True)
    }
    further |= {name: lambda r, name=name: _average(r["after"], name) for name in ("greedy", PASS)}
    further["reward over training"] = mean_reward
    lines = [[f"minus {TITLES[baseline.name]}'s", "pairs", "accuracy", "p", "p (Holm)", *further]]
    tests = [differences(row, baseline, accuracy) for row in others]
    corrected = holm([test.p if test else math.nan for test in tests])
    for row, test, p in zip(others, tests, corrected, strict=True):
        cells = [_difference(test), _p(test.p if test else math.nan), _p(p)]
        cells += [_difference(differences(row, baseline, measure)) for measure in further.values()]
        lines.append([TITLES[row.name], f"{test.difference.n if test else 0} of {row.planned}", *cells])
    return _table(lines)


def mean_reward(result: dict) -> float:
    """Mean reward of all rollouts: higher for a run that learns sooner."""
    return fmean(math.nan if value is None else value for value in result["curves"]["reward"])


def _difference(test: Test | None) -> str:
    if test is None:
        return "missing"
    mean, half, n = test.difference
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if n > 1 else "")


def _p(p: float) -> str:
    return "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def stability_table(rows: Sequence[Row]) -> str:
    """Time and stability, as means over seeds."""
    head = [
        "time and stability",
        "seeds",
        "collapses",
        "gradient norm: median",
        "max",
        "share of p < 0.5, last",
        "entropy, last",
        "tokens, last",
    ]
    lines = [[*head, "s per step", "s per update", "min per run"]]
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
            + [_cell([r["curves"].get(name, [None])[-1] for r in found]) for name in ("low_share", "entropy")]
            + [_cell([r["curves"]["response_length"][-1] for r in found], 1)]
            + [_cell([r["seconds"][name] for r in found], 2) for name in ("step", "update")]
            + [_cell([r["seconds"]["run"] / 60 for r in found], 1)]
        )
    return _table(lines)


def _norms(found: Sequence[dict], measure: str) -> str:
    """The gradient's norm; with Lopti each stage's."""
    stages = {"grad_norm": "", "grad_norm_low": "low ", "grad_norm_high": "high "}
    cells = [title + _cell([r[name][measure] for r in found], 2) for name, title in stages.items() if name in found[0]]
    return ", ".join(cells)


def tuning_table(results: dict[str, dict]) -> str:
    """GRPO at each learning rate."""
    lines = [["learning rate", "seeds", "accuracy before", "after", "greedy", PASS, "collapses"]]
    for rate in runs.LEARNING_RATES:
        planned = [run for run in runs.TUNING if run.learning_rate == rate]
        found = [results[run.name] for run in planned if run.name in results]
        cells = [_cell([_average(r["before"], "accuracy") for r in found])]
        cells += [_cell([_average(r["after"], measure) for r in found]) for measure in ("accuracy", "greedy", PASS)]
        chosen = " (taken)" if rate == runs.LEARNING_RATE else ""
        collapses = f"{sum(r['collapsed'] for r in found)} of {len(found)}"
        lines.append([f"{rate:g}{chosen}", f"{len(found)} of {len(planned)}", *cells, collapses])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# --- picture -------------------------------------------------------------------------------------------------


def picture(results: dict[str, dict], path: Path) -> None:
    """Accuracy by number of people, differences to the baselines, and the curves of reward and gradient norm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    (by_people, against), (reward, norm) = axes
    rows = rows_of(list(runs.GRPO), results)
    _plot_accuracy(by_people, rows)
    _plot_differences(against, results)
    for i, row in enumerate(rows):
        found = list(row.results.values())
        _plot_curve(reward, found, "reward", f"C{i}", "-", f"{TITLES[row.name]}, n = {len(found)}")
        for name, style, stage in (
            ("grad_norm", "-", ""),
            ("grad_norm_low", ":", ", low"),
            ("grad_norm_high", "--", ", high"),
        ):
            _plot_curve(norm, found, name, f"C{i}", style, TITLES[row.name] + stage)
    reward.set(title="mean reward of the rollouts, mean over seeds", xlabel="step")
    norm.set(title="gradient norm (before clipping), mean over seeds", xlabel="step", ylim=(0, None))
    for axis in (by_people, reward, norm):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_curve(axis, found: Sequence[dict], name: str, color: str, style: str, label: str) -> None:
    """The mean over seeds, where all have a value."""
    curves = [r["curves"][name] for r in found if name in r["curves"]]
    if curves:
        mean = [math.nan if None in values else fmean(values) for values in zip(*curves, strict=True)]
        steps = [(k + 0.5) * runs.STEPS / len(mean) for k in range(len(mean))]
        axis.plot(steps, mean, color=color, linestyle=style, label=label)


def _plot_accuracy(axis, rows: Sequence[Row]) -> None:
    bars = [("warm start", "0.7", "before", rows[0])]
    bars += [(TITLES[row.name], f"C{i}", "after", row) for i, row in enumerate(rows)]
    for i, (title, color, when, row) in enumerate(bars):
        for place, source in enumerate(SOURCES):
            values = [result[when][source]["accuracy"][0] for result in row.results.values()]
            if values:
                found = interval(values)
                label = f"{title}, n = {found.n}" if not place else None
                half = 0 if math.isnan(found.half) else found.half
                axis.bar(place + (i - 2) * 0.16, found.mean, 0.15, yerr=half, color=color, capsize=2, label=label)
    axis.set_xticks(range(len(SOURCES)), [f"{people} people" for people in runs.PEOPLE])
    axis.set(title="held-out accuracy (bars: 95% over seeds)")


def _plot_differences(axis, results: dict[str, dict]) -> None:
    labels = []
    groups = ([*runs.GRPO, runs.CONTROL, *runs.ABLATIONS], list(runs.REINFORCE))
    for place, (row, baseline) in enumerate(
        (row, rows[0]) for rows in (rows_of(g, results) for g in groups) for row in rows[1:]
    ):
        test = differences(row, baseline, accuracy)
        labels.append(f"{TITLES[row.name]}{', R++' if baseline.name == 'rpp' else ''} ({len(row.results)})")
        if test:
            half = 0 if math.isnan(test.difference.half) else test.difference.half
            axis.errorbar(test.difference.mean, place, xerr=half, fmt="o", color="C0", capsize=3)
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set(title="accuracy minus baseline, by seed (bars: 95%)", ylim=(len(labels) - 0.5, -0.5))  # from the top


if __name__ == "__main__":
    main()
