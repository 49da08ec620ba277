"""Draw the pictures of docs/results.md, study.png and study_family.png."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from study import runs
from study.comparison import SOURCES, TITLES, Row, accuracy, differences, rows_of
from study.family import COMPARISONS, compare
from study.significance import interval


def picture(results: dict[str, dict], path: Path) -> None:
    """Draw accuracy by number of people, differences to the baselines, and the curves of reward and gradient norm."""
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


def family_picture(results: dict[str, dict], path: Path) -> None:
    """Draw the family's differences to GRPO in both conditions, and Lopti's to as many optimizer steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(runs.CONDITIONS), figsize=(11, 5.5), layout="constrained")
    for axis, condition in zip(axes, runs.CONDITIONS, strict=True):
        labels = []
        for comparison in (c for c in COMPARISONS if c.condition == condition):
            test = compare(comparison, results)
            title = TITLES[f"{condition}-{comparison.name}"]
            title += "" if comparison.baseline == "grpo" else " minus GRPO with as many"
            labels.append(f"{title} ({test.difference.n if test else 0} of {_seeds(comparison.condition)})")
            if test:
                half = 0 if math.isnan(test.difference.half) else test.difference.half
                color = "C1" if comparison.name.endswith("mean-one") else "C0"
                axis.errorbar(test.difference.mean, len(labels) - 1, xerr=half, fmt="o", color=color, capsize=3)
        axis.axvline(0, color="0.5", linewidth=1)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set(title=condition, xlabel="accuracy minus GRPO's (bars: 95%)", ylim=(len(labels) - 0.5, -0.5))
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _seeds(condition: str) -> int:
    return len({run.seed for run in runs.FAMILY if run.condition == condition})


def _plot_curve(axis, found: Sequence[dict], name: str, color: str, style: str, label: str) -> None:
    """Plot the mean over seeds, where all have a value."""
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
