"""Read training runs' TensorBoard logs, and make Fig. 6-8 of them: means and ranges over the seeds of each setting."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

Series = dict[int, float]  # step: value, in the order of the steps

_STATISTICS = "train/tokens/"  # by probability
# {figure: its panels}, each with a title, a unit and a pattern for the names of the scalars.
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


def find_log(folder: str | Path) -> Path:
    """Return the one folder at or below `folder` that holds TensorBoard events. ValueError for none or several."""
    logs = sorted({file.parent for file in Path(folder).rglob("events.out.tfevents.*")})
    if not logs:
        raise ValueError(f"{folder}: no TensorBoard log (events.out.tfevents.*) in it or below")
    if len(logs) > 1:
        raise ValueError(f"{folder}: several TensorBoard logs, name one: {', '.join(map(str, logs))}")
    return logs[0]


def read_scalars(folder: str | Path) -> dict[str, Series]:
    """Return every scalar of the run logged in `folder` or below, by name. ValueError as in `find_log`.

    Where a step was logged twice, as after a resume, the later value counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # By default TensorBoard keeps a sample of 10,000 steps; 0 keeps all.
    events = EventAccumulator(str(find_log(folder)), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def read_run(folder: str | Path) -> dict[str, Series]:
    """Return every finite scalar of the run logged in `folder`, and the policy's entropy as "train/entropy".

    A value that is not finite is left out, with a message. DeepSpeed logs such a gradient norm as -1.

    Raises:
        ValueError: as `find_log`, or the log has no curve of a training run.
    """
    scalars = read_scalars(folder)
    patterns = [pattern for panels in FIGURES.values() for *_, pattern in panels]
    if not any(re.fullmatch(pattern, name) for name in scalars for pattern in patterns):
        raise ValueError(f"{folder}: its TensorBoard log has no curve of a training run, such as {patterns[0]}")
    for name, series in scalars.items():
        wrong = [s for s, v in series.items() if not math.isfinite(v) or (name.endswith("actor_grad_norm") and v < 0)]
        if wrong:
            where = f"{name} is not finite at {len(wrong)} steps, first at step {wrong[0]}"
            print(f"{folder}: {where}: left out", flush=True)
            scalars[name] = {step: value for step, value in series.items() if step not in wrong}
    return scalars | {"train/entropy": entropy(scalars)}


def entropy(scalars: dict[str, Series]) -> Series:
    """Return the policy's entropy in nats per token; empty where nothing that tells it is logged.

    Beside statistics by probability it is `tokens/entropy`, unless the run leaves tokens out. Without them it is
    OpenRLHF's `entropy_loss`, of a run with an entropy bonus.
    """
    has_statistics = any(name.startswith(_STATISTICS) for name in scalars)
    return scalars.get(f"{_STATISTICS}entropy" if has_statistics else "train/entropy_loss", {})


def _mean(series: Sequence[Series]) -> Series:
    """Return the mean of several curves, at the steps that all of them have."""
    steps = set.intersection(*map(set, series)) if series else set()
    return {step: fmean(s[step] for s in series) for step in sorted(steps)}


def curves(runs: Mapping[str, Sequence[dict[str, Series]]]) -> dict[str, list[dict]]:
    """Make the data of Fig. 6-8, {figure: its `panels`}, from {label: the scalars of each of its seeds}."""
    return {figure: panels(runs, wanted) for figure, wanted in FIGURES.items()}


def panels(runs: Mapping[str, Sequence[dict[str, Series]]], wanted: Sequence[tuple[str, str, str]]) -> list[dict]:
    """Make the panels of a picture.

    Args:
        runs: {label: the scalars of each of its seeds}.
        wanted: title, unit and pattern of each panel.

    Returns:
        Panels with `title`, `unit`, `lines` and `missing`, the labels without this curve. The line of a label has
        `steps`, `mean`, `low` and `high` (the range over its seeds), and `seeds`, their number.
    """
    made = []
    for title, unit, pattern in wanted:
        lines, missing = {}, []
        for label, seeds in runs.items():
            # One pattern may match several, such as accuracies by source.
            matching = ([s for name, s in scalars.items() if s and re.fullmatch(pattern, name)] for scalars in seeds)
            found = [series for series in map(_mean, matching) if series]
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
        made.append({"title": title, "unit": unit, "lines": lines, "missing": missing})
    return made
