"""Training curves of several runs from their TensorBoard logs (Fig. 6-8): mean and range over seeds."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

Series = dict[int, float]  # step: value

# The panels of each figure: title, unit, pattern of the scalars' names.
FIGURES = {
    "fig6": (
        ("training reward", "mean reward of the rollouts", r"train/rollout/reward_mean"),
        ("held-out accuracy", "share of right answers", r"eval/.+/accuracy"),
    ),
    "fig7": (
        ("response length", "tokens", r"train/rollout/response_length_mean"),
        ("entropy", "nats per token", r"train/(?:.*/)?entropy(?:_mean|_loss)?"),
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
    """Every scalar of a run. Of a step that was logged twice, as after a resume, the later value counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def select(scalars: dict[str, Series], pattern: str) -> Series:
    """The series whose name matches: of several the mean at the steps that all have, as for accuracy by source."""
    names = [name for name in scalars if re.fullmatch(pattern, name)]
    if "entropy" in pattern:  # the whole policy's, before that of a stage or a bin
        names = sorted(names, key=lambda name: (name.count("/"), len(name)))[:1]
    return _mean([scalars[name] for name in names])


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
