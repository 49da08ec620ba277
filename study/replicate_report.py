"""Write what the rows of `study.replicate` show: table.md with three tables, and curves.png."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study.significance import PairedTest, holm, interval, paired_test, t_quantile
from study.summary import PASS

BASE = "grpo"  # the arm that all others are compared with
# What decides: AR beside an AR that is no smaller step, and Lopti beside as many steps.
_FURTHER_PAIRS = (("ar", "ar-mean-one"), ("lopti", "double-steps"), ("both", "double-steps"))


class Noise(NamedTuple):
    """Tells what two arms of so many seeds differ by, in 95% of all cases, where there is no true difference."""

    deviation: float  # between the seeds of an arm
    degrees: int  # of freedom
    band: float


def of_arm(arm: str, rows: Sequence[dict]) -> list[dict]:
    """Return the rows of an arm."""
    return [row for row in rows if row["arm"] == arm]


def average(row: dict, measure: str) -> float:
    """Return a measure after training, as a mean over the numbers of people."""
    return fmean(values[-1] for values in row["held_out"][measure].values())


def curve(row: dict, measure: str) -> list[float | None]:
    """Return a measure at each evaluation, as a mean over the numbers of people; None where it was lost."""
    found = zip(*row["held_out"][measure].values(), strict=True)
    return [None if None in values else fmean(values) for values in found]


def noise(arms: Sequence[Sequence[float]]) -> Noise | None:
    """Return the noise of a difference between two arms, from the spread over seeds within each; None without any.

    It is t · s · √(2 / n), where s² is the mean of the arms' variances by their degrees of freedom, and n is the
    number of seeds of the arm with the fewest.
    """
    known = [values for values in arms if len(values) > 1]
    if not known:
        return None
    degrees = sum(len(values) - 1 for values in known)
    deviation = math.sqrt(sum((len(values) - 1) * variance(values) for values in known) / degrees)
    return Noise(
        deviation, degrees, t_quantile(degrees) * deviation * math.sqrt(2 / min(map(len, filter(None, arms))))
    )


def compare(arm: str, base: str, measure: str, rows: Sequence[dict]) -> PairedTest | None:
    """Test an arm's measure after training against that of another, paired by seed."""
    values, others = ({row["seed"]: average(row, measure) for row in of_arm(name, rows)} for name in (arm, base))
    return paired_test(values, others)


def table(titles: Mapping[str, str], rows: Sequence[dict]) -> str:
    """Return the tables of what was reached, of differences, and of accuracy along the steps, with the noise."""
    of = {arm: of_arm(arm, rows) for arm in titles}
    reached = [["after training", "seeds", "accuracy", PASS, "reward"]]
    curves = [["accuracy at step", *map(str, rows[0]["evaluated_at"])]]
    for arm, found in of.items():
        values = [cell([average(row, measure) for row in found]) for measure in ("accuracy", PASS)]
        reached.append(
            [titles[arm], str(len(found)), *values, cell([row["curves"]["reward"][-1] for row in found], 2)]
        )
        if found:
            curves.append([titles[arm], *map(cell, zip(*(curve(row, "accuracy") for row in found), strict=True))])
    after = {
        measure: [[average(row, measure) for row in found] for found in of.values() if found]
        for measure in ("accuracy", PASS)
    }
    of_base = [average(row, "accuracy") for row in of_arm(BASE, rows)]
    said = [_said("accuracies", "the runs of GRPO", noise([of_base]))]
    said += [
        _said(name, "all arms", noise(after[measure])) for name, measure in (("accuracies", "accuracy"), (PASS, PASS))
    ]
    return "\n".join(
        [markdown_table(reached), markdown_table(_differences(titles, rows)), *said, markdown_table(curves)]
    )


def _differences(titles: Mapping[str, str], rows: Sequence[dict]) -> list[list[str]]:
    """Return each arm minus `BASE`, and what decides. Holm's correction is for all these differences in accuracy."""
    pairs = [*((arm, BASE) for arm in titles if arm != BASE), *(p for p in _FURTHER_PAIRS if {*p} <= titles.keys())]
    tests = [compare(*pair, "accuracy", rows) for pair in pairs]
    corrected = holm([test.p if test else math.nan for test in tests])
    lines = [["difference", "pairs", "accuracy", "p", "p (Holm)", PASS]]
    for (arm, base), test, p in zip(pairs, tests, corrected, strict=True):
        cells = [difference(test), p_value(test.p if test else math.nan), p_value(p)]
        cells.append(difference(compare(arm, base, PASS, rows)))
        lines.append([f"{titles[arm]} − {titles[base]}", str(test.difference.n if test else 0), *cells])
    return lines


def cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean ± half-width of the values of seeds, of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return "-" if values else "missing"
    found = interval(known)
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.half) else f" ± {found.half:.{digits}f}")


def difference(test: PairedTest | None) -> str:
    """Return a difference and the half-width of its 95% interval."""
    if test is None:
        return "missing"
    mean, half, n = test.difference
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if n > 1 else "")


def p_value(p: float) -> str:
    """Return a p-value, or nothing where there is none."""
    return "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _said(what: str, where: str, found: Noise | None) -> str:
    if not found:
        return f"Noise of {what}, from {where}: not known before two seeds.\n"
    return (
        f"Noise of {what}, from {where}: a standard deviation of {found.deviation:.3f} between seeds ({found.degrees} "
        f"degrees of freedom), so that two arms differ by up to {found.band:.3f} by chance (95%).\n"
    )


def write_report(titles: Mapping[str, str], rows: Sequence[dict], diverged: Sequence[str], out: Path) -> None:
    """Write the tables and the picture of the rows that there are, and name the runs that have none."""
    head = "± is the 95% half-width over seeds (Student's). Differences are paired by seed.\n\n"
    if diverged:
        head += f"Diverged, and so missing from every mean and difference: {', '.join(diverged)}.\n\n"
    (out / "table.md").write_text(head + table(titles, rows), "utf-8")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, measure in zip(axes, ("accuracy", PASS), strict=True):
        of_base = noise([[average(row, measure) for row in of_arm(BASE, rows)]])
        for arm in dict.fromkeys(row["arm"] for row in rows):
            found, steps = of_arm(arm, rows), rows[0]["evaluated_at"]
            of_seeds = zip(*(curve(row, measure) for row in found), strict=True)
            known = [[value for value in values if value is not None] for values in of_seeds]
            mean = [fmean(values) if values else math.nan for values in known]
            axis.plot(steps, mean, marker="o", markersize=3, label=f"{titles[arm]}, n = {len(found)}")
            if arm == BASE and of_base:
                low, high = ([value + sign * of_base.band for value in mean] for sign in (-1, 1))
                axis.fill_between(steps, low, high, color="0.5", alpha=0.15, label="noise, from GRPO's runs")
        axis.set(title=f"held-out {measure}, mean over seeds", xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out / "curves.png", dpi=110)
    plt.close(figure)
