"""Write what the rows of `study.replicate` show: table.md with two tables, and curves.png."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study.comparison import PASS
from study.significance import PairedTest, paired_test, t_quantile
from study.tables import cell, difference

BASE = "grpo"  # the arm that the others are compared with


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
    number of seeds of the arm with the most.
    """
    known = [values for values in arms if len(values) > 1]
    if not known:
        return None
    degrees = sum(len(values) - 1 for values in known)
    deviation = math.sqrt(sum((len(values) - 1) * variance(values) for values in known) / degrees)
    return Noise(deviation, degrees, t_quantile(degrees) * deviation * math.sqrt(2 / max(map(len, known))))


def compare(arm: str, measure: str, rows: Sequence[dict]) -> PairedTest | None:
    """Test an arm's measure after training against that of `BASE`, paired by seed."""
    values, base = ({row["seed"]: average(row, measure) for row in of_arm(name, rows)} for name in (arm, BASE))
    return paired_test(values, base)


def table(titles: Mapping[str, str], rows: Sequence[dict]) -> str:
    """Return the tables of accuracy and pass@8 after training, and of accuracy after each epoch, with the noise."""
    of = {arm: of_arm(arm, rows) for arm in titles}
    lines = [["after training", "seeds", "accuracy", "minus GRPO's", PASS, "minus GRPO's", "reward"]]
    curves = [["accuracy after epoch", *map(str, range(len(rows[0]["evaluated_at"])))]]
    for arm, found in of.items():
        line = [titles[arm], str(len(found))]
        for measure in ("accuracy", PASS):
            against = "" if arm == BASE else difference(compare(arm, measure, rows))
            line += [cell([average(row, measure) for row in found]), against]
        lines.append([*line, cell([row["curves"]["reward"][-1] for row in found], 2)])
        if found:
            curves.append([titles[arm], *map(cell, zip(*(curve(row, "accuracy") for row in found), strict=True))])
    after = {arm: [average(row, "accuracy") for row in found] for arm, found in of.items()}
    said = [_said("the runs of GRPO", noise([after[BASE]])), _said("all arms", noise(list(after.values())))]
    return "\n".join([markdown_table(lines), *said, markdown_table(curves)])


def _said(where: str, found: Noise | None) -> str:
    if not found:
        return f"Noise, from {where}: not known before two seeds.\n"
    return (
        f"Noise, from {where}: a standard deviation of {found.deviation:.3f} between seeds ({found.degrees} degrees "
        f"of freedom), so that accuracies differ by up to {found.band:.3f} by chance (95%).\n"
    )


def write_report(titles: Mapping[str, str], rows: Sequence[dict], out: Path) -> None:
    """Write the tables and the picture of the rows that there are."""
    head = "± is the 95% half-width over seeds (Student's). Differences are paired by seed.\n\n"
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
