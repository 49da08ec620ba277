"""Put training runs side by side: how accurate each has become, in how many steps, and how long a step takes."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from arlopti_openrlhf.lab.analysis.curves import Series

_ACCURACY = r"eval/(?P<source>.+)/accuracy"
_REWARD, _SECONDS = "train/rollout/reward_mean", "train/timing/step_total"


def compare(runs: Mapping[str, Mapping[str, Series]], configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict]:
    """Return what sets runs apart.

    Args:
        runs: {name of a run: its scalars}.
        configs: {name of a run: its flags}, of the runs whose flags are known.

    Returns:
        {name: `steps`, `seconds_per_step` (the median), `accuracy` by data source and `flags`}. Of a source there are
        `before`, `best` and `last`: each a step, the accuracy, and the ends of its 95% interval. Without an evaluation
        `reward` has the same of the rollouts' mean reward, without intervals. `flags` are those that differ.
    """
    differing = _differing(list(configs.values()))
    return {
        name: {
            "steps": max(scalars.get(_REWARD, {}), default=0),
            "seconds_per_step": median(scalars[_SECONDS].values()) if scalars.get(_SECONDS) else None,
            "accuracy": {
                match["source"]: _ends(series, scalars.get(f"{key}/low"), scalars.get(f"{key}/high"))
                for key, series in sorted(scalars.items())
                if series and (match := re.fullmatch(_ACCURACY, key))
            },
            "reward": _ends(scalars[_REWARD]) if scalars.get(_REWARD) else None,
            "flags": {flag: configs[name].get(flag) for flag in differing} if name in configs else None,
        }
        for name, scalars in runs.items()
    }


def table(compared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table of what `compare` returned, with the flags that differ below it."""
    rows = [["run", "measure", "before", "best", "last", "steps", "s per step"], ["---"] * 7]
    for name, run in compared.items():
        seconds = "" if run["seconds_per_step"] is None else f"{run['seconds_per_step']:.1f}"
        measures = {f"accuracy, {source}": ends for source, ends in run["accuracy"].items()}
        for measure, ends in (measures or {"training reward": run["reward"] or {}}).items():
            cells = [_cell(ends[when]) if ends else "" for when in ("before", "best", "last")]
            rows.append([name, measure, *cells, str(run["steps"]), seconds])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for name, run in compared.items():
        if run["flags"] is None:
            lines.append(f"{name}: its config.yaml was not found, so its flags are not compared")
        elif run["flags"]:
            lines.append(f"{name}: " + ", ".join(f"--{flag} {value}" for flag, value in run["flags"].items()))
    return lines


def _ends(series: Series, low: Series | None = None, high: Series | None = None) -> dict[str, dict]:
    steps = {"before": min(series), "best": max(series, key=lambda step: series[step]), "last": max(series)}
    return {
        when: {"step": step, "value": series[step], "low": (low or {}).get(step), "high": (high or {}).get(step)}
        for when, step in steps.items()
    }


def _cell(end: Mapping[str, Any]) -> str:
    interval = "" if end["low"] is None or end["high"] is None else f" ({end['low']:.3f} to {end['high']:.3f})"
    return f"{end['value']:.3f}{interval}, step {end['step']}"


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    flags = sorted({flag for config in configs for flag in config})
    return [flag for flag in flags if any(config.get(flag) != configs[0].get(flag) for config in configs)]
