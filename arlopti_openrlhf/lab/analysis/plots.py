"""Draw the figures as PNG, each from its JSON alone."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from cycler import cycler  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

_DPI = 130
# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
_POSITIVE, _NEGATIVE = _COLOURS[2], _COLOURS[1]


def write(name: str, data: Any, folder: Path) -> None:
    """Write the figure called `name` ("fig1" ...) as a picture and as JSON."""
    (folder / f"{name}.png").write_bytes(png(name, data))
    write_json(data, folder / f"{name}.json")


def write_json(data: Any, path: Path) -> None:
    """Write data as JSON. ValueError for a number that is not finite, which JSON cannot express."""
    path.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def png(name: str, data: Any) -> bytes:
    """Draw the figure called `name` from its data and return it as PNG."""
    style = {
        "axes.prop_cycle": cycler(color=_COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
    } | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#222222")
    with plt.rc_context(style):
        figure = _DRAW[name](data)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI)
        plt.close(figure)
    return file.getvalue()


def _figure_1(data: dict) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained")
    (histogram, advantages, change), (norms, lowest, highest) = axes
    counts = data["histogram"]
    width = 1 / len(counts)
    histogram.bar([(i + 0.5) * width for i in range(len(counts))], [c / data["tokens"] for c in counts], width)
    histogram.set(title="(a) probabilities of the tokens", xlabel="probability π", ylabel="share of tokens (log)")
    histogram.set_yscale("log")

    groups = [g for g in data["groups"] if g["tokens"]]
    names = [f"{g['name']}\n{g['tokens']:,}" for g in groups]
    boxes = [
        dict(whislo=a["p5"], q1=a["p25"], med=a["median"], q3=a["p75"], whishi=a["p95"], mean=a["mean"])
        for a in (g["advantages"] for g in groups)
    ]
    ink = plt.rcParams["text.color"]
    lines = {key: {"color": ink} for key in ("boxprops", "whiskerprops", "capprops", "medianprops")}
    point = dict(marker="D", markersize=4, markerfacecolor=_COLOURS[0], markeredgecolor="none")
    advantages.bxp(boxes, showfliers=False, showmeans=True, meanprops=point, **lines)
    advantages.set_xticks(range(1, len(names) + 1), names)
    advantages.set(title="(b) advantages: 5-25-50-75-95%, mean ◆", xlabel="probability, number of tokens")
    advantages.set_ylabel("advantage")

    bars = norms.bar(names, [g["gradient_norm"] for g in groups])
    norms.bar_label(bars, [f"{g['gradient_norm']:.3g}" for g in groups], fontsize=8)
    norms.margins(y=0.12)
    norms.set(title="(d) gradient norm, all parameters", xlabel="probability, number of tokens", ylabel="‖∂L/∂θ‖")

    titles = [
        "(c) change by one update of all tokens",
        "(e) ... of the lowest quarter alone",
        "(f) ... of the highest quarter alone",
    ]
    # One scale for the three. Outliers do not set it.
    sizes = sorted(abs(v) for c in data["change"].values() for v in c["points"])
    limit = 1.1 * sizes[int(0.998 * (len(sizes) - 1))] or 1e-6
    # One call draws the points in the order of the sample, so neither sign hides the other.
    colours = [_POSITIVE if a > 0 else _NEGATIVE if a else _COLOURS[-1] for a in data["points"]["advantage"]]
    for name, axis, title in zip(("all", "lowest", "highest"), (change, lowest, highest), titles, strict=True):
        axis.scatter(
            data["points"]["probability"], data["change"][name]["points"], s=4, alpha=0.5, c=colours, linewidths=0
        )
        axis.set(title=title, xlabel="probability π before", ylabel="change of π", ylim=(-limit, limit))
        axis.axhline(0, color=ink, linewidth=0.6)
    for sign, colour in ((">", _POSITIVE), ("<", _NEGATIVE)):
        change.scatter([], [], c=colour, label=f"advantage {sign} 0")
    figure.legend(*change.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return figure


def _figure_2(data: dict) -> Figure:
    panels = data["layers"]
    figure, axes = plt.subplots(1, len(panels), figsize=(2.9 * len(panels), 3.3), layout="constrained", squeeze=False)
    rest = data["one_minus_probability"]
    for axis, panel in zip(axes[0], panels, strict=True):
        is_logits = panel["layer"] == "logits"
        slope = panel["slope"] or {"p5": 0.0, "p95": 0.0}  # none where all probabilities are 1
        low, high = data["logit_slopes"] if is_logits else (slope["p5"], slope["p95"])
        axis.fill_between([0, 1], [0, low], [0, high], alpha=0.2, color=_COLOURS[1], linewidth=0)
        axis.plot([0, 1], [0, low], [0, 1], [0, high], color=_COLOURS[1], linewidth=1)
        axis.scatter(rest, panel["norm"], s=6, alpha=0.6)
        cone = "cone: Proposition 4.2" if is_logits else "cone: 5-95% of the slopes"
        axis.set(title=f"{panel['layer']}\n{cone}", xlabel="1 - π", ylim=(0, 1.05 * max(*panel["norm"], high, 1e-9)))
    axes[0][0].set_ylabel("norm of one token's gradient")
    return figure


def _figure_3(data: dict) -> Figure:
    figure, axes = plt.subplots(2, 1, figsize=(8, 6.6), layout="constrained", sharex=True, sharey=True)
    bins = data["bins"][:-1]
    for axis, method in zip(axes, ("AR", "Lopti"), strict=True):
        shown = {n: r for n, r in data["right_direction"].items() if n == "GRPO" or n.startswith(method)}
        for i, (name, results) in enumerate(shown.items()):
            points = [(j, r["share"], r["ci95"] or 0) for j, r in enumerate(results[:-1]) if r]
            x, y, error = zip(*points, strict=True) if points else ([], [], [])
            shift = 0.06 * (i - (len(shown) - 1) / 2)
            kind, colour = ("o--", _COLOURS[-1]) if name == "GRPO" else ("o-", None)
            style = {"markersize": 4, "linewidth": 1.2, "elinewidth": 0.8}
            axis.errorbar([j + shift for j in x], y, error, fmt=kind, color=colour, label=name, **style)
        axis.axhline(0.5, color=plt.rcParams["text.color"], linewidth=0.8, linestyle=":")
        axis.set(title=f"GRPO and {method}", ylabel="share of positive tokens\nwhose probability rises")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    counts = data["positive_tokens"]
    axes[1].set_xticks(range(len(bins)), [f"{b}\n{n:,}" for b, n in zip(bins, counts, strict=False)])
    axes[1].set_xlabel("probability before the update, number of positive tokens (bars: 95%, clustered by prompt)")
    return figure


def _figure_5(data: dict) -> Figure:
    figure, (correlation, frequency) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained", sharey=True)
    categories = list(next(iter(data.values())))
    height = 0.8 / len(data)
    for i, (model, by_category) in enumerate(data.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        y = [j + (i - (len(data) - 1) / 2) * height for j in range(len(categories))]
        results = [by_category[name] for name in categories]
        for place, result in zip(y, results, strict=True):
            middle, low, high = (result[key] for key in ("correlation", "low", "high"))
            if middle is None or low is None or high is None:
                correlation.text(0.02, place, "does not vary", va="center", fontsize=7)
                continue
            # A percentile interval need not hold the value.
            error = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            correlation.errorbar(middle, place, xerr=error, fmt="o", color=colour, markersize=4, capsize=2)
        bars = frequency.barh(y, [r["per_1000_words"] for r in results], height * 0.9, color=colour, label=model)
        labels = [f"{r['per_1000_words']:.3g} (in {r['responses']:.1%} of responses)" for r in results]
        frequency.bar_label(bars, labels, fontsize=7, padding=2)
    correlation.set_yticks(range(len(categories)), categories)
    correlation.invert_yaxis()
    correlation.axvline(0, color=plt.rcParams["text.color"], linewidth=0.8)
    correlation.set(title="correlation with the reward (bars: 95%)", xlabel="Pearson's r, per response", xlim=(-1, 1))
    frequency.set(title="frequency", xlabel="occurrences per 1000 words")
    frequency.margins(x=0.5)  # room for the labels
    if not any(result["per_1000_words"] for results in data.values() for result in results.values()):
        frequency.set_xlim(0, 1)
    if len(data) > 1:
        figure.legend(*frequency.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(data)))
    return figure


def _curves(data: list[dict]) -> Figure:
    one_unit = len({panel["unit"] for panel in data}) == 1
    columns = min(3, len(data))
    shape = (-(-len(data) // columns), columns)
    figure, axes = plt.subplots(
        *shape, figsize=(10, 3.5 * shape[0]), layout="constrained", squeeze=False, sharex=True, sharey=one_unit
    )
    for axis in axes.flat[len(data) :]:
        axis.remove()
    labels = list(dict.fromkeys(label for panel in data for label in [*panel["lines"], *panel["missing"]]))
    handles: dict[str, Line2D] = {}
    for axis, panel in zip(axes.flat, data, strict=False):
        for label, line in panel["lines"].items():
            colour = _COLOURS[labels.index(label) % len(_COLOURS)]
            marker = "." if len(line["steps"]) < 12 else None
            (handles[label],) = axis.plot(line["steps"], line["mean"], color=colour, marker=marker, label=label)
            if line["seeds"] > 1:
                axis.fill_between(line["steps"], line["low"], line["high"], color=colour, alpha=0.2, linewidth=0)
        if not panel["lines"]:
            axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelbottom=True)  # also where the place below is empty
        axis.set(title=panel["title"], xlabel="step", ylabel=panel["unit"])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, max(1, len(handles))))
    return figure


_DRAW: dict[str, Callable[..., Figure]] = {
    "fig1": _figure_1,
    "fig2": _figure_2,
    "fig3": _figure_3,
    "fig5": _figure_5,
    **dict.fromkeys(("fig6", "fig7", "fig8"), _curves),
}
