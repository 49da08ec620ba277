"""Summarize a run: its training curves, gradient norms and times, and the commit and the machine that made it."""

import math
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from arlopti_openrlhf.lab.analysis.curves import Series

ROOT = Path(__file__).resolve().parents[1]
Scalars = dict[str, Series]

_CURVE_POINTS = 20
_REWARD = "train/rollout/reward_mean"  # logged at every step
_GROUPS = [(method, group) for method in ("lopti", "random_groups") for group in ("low", "high")]
# {scalar of the run's TensorBoard log: its name in the result}. Which of them a run has depends on its methods.
CURVES = {
    _REWARD: "reward",
    "train/rollout/response_length_mean": "response_length",
    "train/rollout/truncated_rate": "truncated",
    "train/kl": "kl",
    "train/ppo_clip_ratio": "clip_ratio",
    "train/clip_factor": "clip_factor",
} | {f"train/{method}/{group}/clip_factor": f"clip_factor_{group}" for method, group in _GROUPS}
# The same for the gradient's norm before clipping, in a step's last mini-batch. Lopti has one for each stage.
NORMS = {"train/actor_grad_norm": "grad_norm"} | {
    f"train/{method}/{group}/actor_grad_norm": f"grad_norm_{group}" for method, group in _GROUPS
}
PASS = "pass@8"
MEASURES = ("accuracy", PASS, "well_formed", "truncated", "response_length")


def median_and_max(grad_norms: Iterable[float]) -> dict[str, float | None]:
    """Return the two of those norms that are finite; None where none is."""
    finite = [norm for norm in grad_norms if 0 <= norm < math.inf]
    if not finite:
        return {"median": None, "max": None}
    return {"median": _rounded(median(finite)), "max": _rounded(max(finite))}


def along(scalars: Scalars, name: str) -> list[float]:
    """Return a scalar at each step; nan where it has no value, or is a gradient norm that is not finite.

    DeepSpeed logs such a norm as -1.
    """
    values = {step: math.nan if name in NORMS and value < 0 else value for step, value in scalars[name].items()}
    return [values.get(step, math.nan) for step in scalars[_REWARD]]


def thinned(values: Sequence[float]) -> list[float | None]:
    """Return the means of up to 20 equal stretches, to four digits; None for one without a finite value."""
    size = -(-len(values) // _CURVE_POINTS)
    stretches = [values[start : start + size] for start in range(0, len(values), size)]
    finite = [[value for value in stretch if math.isfinite(value)] for stretch in stretches]
    return [_rounded(fmean(stretch)) if stretch else None for stretch in finite]


def _rounded(value: float) -> float:
    """Return `value` to four digits."""
    return float(f"{value:.4g}")


def step_seconds(scalars: Scalars) -> dict[str, float]:
    """Return the mean seconds of a step and of its parts, without the first step, which warms up."""
    names = {"timing/step_total": "step", "timing/generation": "generation", "timing/ppo_train": "update"}
    return {short: round(fmean(list(scalars[f"train/{name}"].values())[1:]), 3) for name, short in names.items()}


def commit() -> str:
    """Return the checkout's commit, with a + if its tracked files have changes."""
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "-s", "-uno") else "")


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip()


def machine() -> dict:
    """Return the processor's name and its number of cores."""
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count()}
