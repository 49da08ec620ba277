"""Show what came out of a quickstart: accuracies, the picture of its curves, and the closing text."""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

from arlopti_openrlhf.analysis.scalars import Series
from arlopti_openrlhf.scoring.measures import Z_95, estimate_source
from arlopti_openrlhf.scoring.offline import responses_of


def read_accuracies(responses: Path) -> dict[str, dict[str, float]]:
    """Return the measures of an evaluation by source, and of all sources together as "all".

    Each has `n` puzzles, `accuracy` and its `ci95` (half-width), `pass@k` and `greedy` accuracy.

    Args:
        responses: the MODEL.responses.jsonl of an evaluation with `--greedy`.
    """
    groups: dict[tuple[str, bool], list] = defaultdict(list)
    with open(responses, encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            for source in (record["datasource"], "all"):
                groups[source, record["temperature"] > 0].append(responses_of(record))
    results = {}
    for source in sorted({source for source, _ in groups}):
        sampled, greedy = (estimate_source(groups[source, is_sampled]) for is_sampled in (True, False))
        results[source] = {
            "n": len(groups[source, True]),
            "ci95": Z_95 * sampled["accuracy"].standard_error,
            "greedy": greedy["accuracy"].value,
        } | {name: estimate.value for name, estimate in sampled.items()}
    return results


def plot(curves: dict[str, Series], before: dict, after: dict, path: Path) -> None:
    """Draw reward, accuracy, the share of low-probability tokens and the gradient norms over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    (reward, accuracy), (share, norm) = axes
    _plot_series(reward, curves["train/rollout/reward_mean"], color="C0")
    reward.set(title="mean reward of the rollouts")
    last_step = max(curves["train/rollout/reward_mean"])
    for i, source in enumerate(sorted(set(before) - {"all"})):
        during = curves.get(f"eval/{source}/accuracy", {})
        _plot_series(accuracy, during, ".-", color=f"C{i}", alpha=0.5, label=f"{source}, during")
        for step, accuracies in ((0, before), (last_step, after)):
            accuracy.errorbar(
                step, accuracies[source]["accuracy"], accuracies[source]["ci95"], fmt="o", color=f"C{i}", capsize=3
            )
    accuracy.set(title="held-out accuracy, sampled (bars: 95%)", ylim=(0, None))
    accuracy.legend(frameon=False, loc="upper left")
    _plot_series(share, curves["train/lopti/low_share"], color="C3")
    share.set(title="share of tokens with probability < η", xlabel="step", ylim=(0, None))
    for group, color in (("low", "C3"), ("high", "C2")):
        # A run of a few steps may never see one of the groups.
        series = curves.get(f"train/lopti/{group}/actor_grad_norm", {})
        _plot_series(norm, series, color=color, label=f"{group}-probability stage")
    norm.set(title="gradient norm of each stage", xlabel="step", ylim=(0, None))
    norm.legend(frameon=False, loc="lower left")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _plot_series(axis, series: Series, *style: str, **options) -> None:
    axis.plot(list(series), list(series.values()), *style, **options)


def report(summary: dict, out: Path, pass_k: str) -> str:
    """Return the results as text, with what to do next.

    Args:
        summary: what summary.json holds.
        out: the quickstart's folder.
        pass_k: the measure to show beside accuracy, such as "pass@8".
    """
    overall = summary["overall"]
    before, after = (summary[when] | {"all": overall[when]} for when in ("before", "after"))
    lines = [
        "",
        f"{'held out':<9} {'puzzles':>7}   {'sampled, before':>16} {'after':>14}   {'greedy':>13}   {pass_k:>13}",
    ]
    for source in sorted(before, key=lambda s: (s == "all", s)):
        b, a = before[source], after[source]
        lines.append(
            f"{source:<9} {b['n']:>7}   {b['accuracy']:>8.3f} ± {b['ci95']:.3f}"
            f" {a['accuracy']:>6.3f} ± {a['ci95']:.3f}"
            f"   {b['greedy']:.3f} → {a['greedy']:.3f}   {b[pass_k]:.3f} → {a[pass_k]:.3f}"
        )
    rise = after["all"]["accuracy"] - before["all"]["accuracy"]
    standard_error = (before["all"]["ci95"] ** 2 + after["all"]["ci95"] ** 2) ** 0.5 / Z_95
    lines += [
        "",
        f"Sampled accuracy changed by {rise:+.3f}, {rise / max(standard_error, 1e-9):.1f} standard errors (clustered "
        f"by puzzle), in {summary['minutes']:.1f} minutes and {summary['peak_rss_gib']:.1f} GiB.",
        f"Curves:  {out / 'curves.png'}",
        f"Trained: {out / 'checkpoint'}",
        "Next:    SEED=1 make quickstart",
        f"         {os.path.relpath(Path(sys.executable).with_name('tensorboard'))} --logdir {out / 'tensorboard'}",
        "         examples/scripts/train_kk.sh    # the paper's run, on 4 GPUs",
    ]
    return "\n".join(lines)
