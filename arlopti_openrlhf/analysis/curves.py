"""Training curves of several runs from their TensorBoard logs, as in Fig. 6-8: mean and range over seeds."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

Series = dict[int, float]  # step: value

_BIN = "train/tokens/{}/{}"  # the statistics by probability that every training of ours logs
# The panels of each figure: title, unit, pattern of the scalars' names.
FIGURES = {
    "fig6": (
        ("training reward", "mean reward of the rollouts", r"train/rollout/reward_mean"),
        ("held-out accuracy", "share of right answers", r"eval/.+/accuracy"),
    ),
    "fig7": (
        ("response length", "tokens", r"train/rollout/response_length_mean"),
        ("entropy", "nats per token", "train/entropy"),
    ),
    "fig8": (
        ("gradient norm, one update", "norm before clipping", r"train/actor_grad_norm"),
        ("gradient norm, low-probability stage", "norm before clipping", r"train/lopti/low/actor_grad_norm"),
        ("gradient norm, high-probability stage", "norm before clipping", r"train/lopti/high/actor_grad_norm"),
    ),
}


def find_log(folder: str) -> Path:
    """The one folder at or below `folder` with TensorBoard events. ValueError where there is none, or several."""
    logs = sorted({file.parent for file in Path(folder).rglob("events.out.tfevents.*")})
    if not logs:
        raise ValueError(f"{folder}: no TensorBoard log (events.out.tfevents.*) in it or below")
    if len(logs) > 1:
        raise ValueError(f"{folder}: several TensorBoard logs, name one: {', '.join(map(str, logs))}")
    return logs[0]


def read_scalars(log: Path) -> dict[str, Series]:
    """Every scalar of a run. Of a step that was logged twice, as after a resume, the later value counts.

    What is not finite (DeepSpeed logs such a gradient norm as -1) is left out, and said.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    for name, series in scalars.items():
        wrong = [s for s, v in series.items() if not math.isfinite(v) or (name.endswith("actor_grad_norm") and v < 0)]
        if wrong:
            print(f"{log}: {name} is not finite at {len(wrong)} steps, first at step {wrong[0]}: left out", flush=True)
            scalars[name] = {step: value for step, value in series.items() if step not in wrong}
    return scalars | {"train/entropy": entropy(scalars)}


def entropy(scalars: dict[str, Series]) -> Series:
    """The policy's entropy: OpenRLHF's `entropy_loss`, which an entropy bonus logs, or Σ share · entropy over the bins
    of probability. Empty where neither is logged."""
    if "train/entropy_loss" in scalars:
        return scalars["train/entropy_loss"]
    bins = [match[1] for match in (re.fullmatch(_BIN.format("([^/]+)", "entropy"), name) for name in scalars) if match]
    sums: dict[int, tuple[float, float]] = {}
    for name in bins:
        shares = scalars.get(_BIN.format(name, "share"), {})
        for step, value in scalars[_BIN.format(name, "entropy")].items():
            total, weight = sums.get(step, (0.0, 0.0))
            sums[step] = (total + shares.get(step, 0.0) * value, weight + shares.get(step, 0.0))
    return {step: total / weight for step, (total, weight) in sorted(sums.items()) if weight}


def select(scalars: dict[str, Series], pattern: str) -> Series:
    """The series whose name matches: of several the mean at the steps that all have, as for accuracy by source."""
    return _mean([series for name, series in scalars.items() if series and re.fullmatch(pattern, name)])


def _mean(series: Sequence[Series]) -> Series:
    steps = set.intersection(*(set(s) for s in series)) if series else set()
    return {step: fmean(s[step] for s in series) for step in sorted(steps)}


def curves(runs: dict[str, Sequence[dict[str, Series]]]) -> dict[str, list[dict]]:
    """Fig. 6-8 from {label: the scalars of each of its seeds}.

    Returns:
        For each figure its panels: `title`, `unit`, `lines`, one per label that has the curve, with `steps`, `mean`,
        `low`, `high` (the range over its seeds) and `seeds`; and `missing`, the labels that lack it.
    """
    figures: dict[str, list[dict]] = {}
    for figure, panels in FIGURES.items():
        figures[figure] = []
        for title, unit, pattern in panels:
            lines, missing = {}, []
            for label, seeds in runs.items():
                found = [series for series in (select(scalars, pattern) for scalars in seeds) if series]
                middle = _mean(found)
                if not middle:
                    missing.append(label)
                    continue
                lines[label] = {
                    "seeds": len(found),
                    "steps": list(middle),
                    "mean": list(middle.values()),
                    "low": [min(series[step] for series in found) for step in middle],
                    "high": [max(series[step] for series in found) for step in middle],
                }
            figures[figure].append({"title": title, "unit": unit, "lines": lines, "missing": missing})
    return figures
