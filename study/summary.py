"""Summarize a run's log: accuracy before and after, curves, gradient norms, times, and whether the run collapsed."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from arlopti_openrlhf.lab.analysis.curves import Series
from study import runs
from study.runs import Run

Scalars = dict[str, Series]

_CURVE_POINTS = 20
_REWARD = "train/rollout/reward_mean"  # logged at every step
# {scalar of the run's TensorBoard log: its name in the result}. Which of them a run has depends on its methods.
CURVES = {
    _REWARD: "reward",
    "train/rollout/response_length_mean": "response_length",
    "train/rollout/truncated_rate": "truncated",
    "train/kl": "kl",
    "train/ppo_clip_ratio": "clip_ratio",
}
# The same for the gradient's norm before clipping, in a step's last mini-batch. Lopti has one for each stage.
NORMS = {
    "train/actor_grad_norm": "grad_norm",
    "train/lopti/low/actor_grad_norm": "grad_norm_low",
    "train/lopti/high/actor_grad_norm": "grad_norm_high",
}
# Bins of the statistics by probability, below and above 0.5.
LOW_BINS, HIGH_BINS = ("p0.00-0.25", "p0.25-0.50"), ("p0.50-0.75", "p0.75-1.00")
MEASURES = ("accuracy", f"pass@{runs.EVAL_SAMPLES}", "well_formed", "truncated", "response_length")


def summarize(run: Run, scalars: Scalars) -> dict:
    """Return what a result says of the policy: held-out measures before and after, curves, gradient norms."""
    curves = {short: along(scalars, name) for name, short in (CURVES | NORMS).items() if name in scalars}
    if "--algo.lopti.groups" in run.flags:  # the statistics by probability know the tokens of that group alone
        curves["low_share"] = along(scalars, "train/lopti/low_share")
    else:
        curves["low_share"] = over_bins(scalars, LOW_BINS, "share")
        curves["low_grad_share"] = over_bins(scalars, LOW_BINS, "grad_share")
        curves["entropy"] = over_bins(scalars, LOW_BINS + HIGH_BINS, "entropy")
    # Of a token method, before its weights are normalized. Each run has one at most.
    for short in ("mean_weight", "zero_share"):
        for name in fnmatch.filter(scalars, f"train/token_method/*/{short}"):
            curves[short] = along(scalars, name)
    if "--algo.token_method ar" in run.flags and "train/ar/mean_weight" in scalars:
        curves["mean_weight"] = along(scalars, "train/ar/mean_weight")
        curves["zero_share"] = [0.0] * len(curves["mean_weight"])  # AR leaves out no token
    norms = {short: list(scalars[name].values()) for name, short in NORMS.items() if name in scalars}
    return {
        "run": run.name,
        "family": run.family,
        "variant": run.variant,
        "seed": run.seed,
        "configuration": runs.configuration(run),
        "before": held_out(scalars, 0),
        "after": held_out(scalars, -1),
        "collapsed": collapsed(list(scalars[_REWARD].values()), [norm for of in norms.values() for norm in of]),
        "curves": {name: thinned(values) for name, values in curves.items()},
        **{name: median_and_max(values) for name, values in norms.items()},
    }


def median_and_max(grad_norms: Iterable[float]) -> dict[str, float | None]:
    """Return the two of those norms that are finite; None where none is."""
    finite = [norm for norm in grad_norms if 0 <= norm < math.inf]
    if not finite:
        return {"median": None, "max": None}
    return {"median": rounded(median(finite)), "max": rounded(max(finite))}


def along(scalars: Scalars, name: str) -> list[float]:
    """Return a scalar at each step; nan where it has no value, or is a gradient norm that is not finite.

    DeepSpeed logs such a norm as -1.
    """
    values = {step: math.nan if name in NORMS and value < 0 else value for step, value in scalars[name].items()}
    return [values.get(step, math.nan) for step in scalars[_REWARD]]


def over_bins(scalars: Scalars, bins: Sequence[str], statistic: str) -> list[float]:
    """Return, at each step, the sum over the bins of a share, or of a mean per token times the bin's share of tokens.

    Args:
        scalars: the run's.
        bins: of the statistics by probability. A bin without tokens in a step has no scalars there.
        statistic: "share", "grad_share" or "entropy".
    """
    sums = dict.fromkeys(scalars[_REWARD], 0.0)
    for name in bins:
        shares = scalars.get(f"train/tokens/{name}/share", {})
        for step, value in scalars.get(f"train/tokens/{name}/{statistic}", {}).items():
            sums[step] += value if "share" in statistic else shares[step] * value
    return list(sums.values())


def held_out(scalars: Scalars, evaluation: int) -> dict[str, dict]:
    """Return, by source, the number of puzzles, [value, low, high] of each measure, and greedy accuracy likewise.

    Args:
        scalars: the run's.
        evaluation: number of the evaluation: 0 is the one before training, -1 the one after it.
    """
    sources: dict[str, dict] = {}
    for source in (f"kk_{people}ppl" for people in runs.PEOPLE):

        def estimate(measure: str) -> list[float]:
            names = (f"eval/{measure}{end}" for end in ("", "/low", "/high"))
            return [round(list(scalars[name].values())[evaluation], 4) for name in names]

        sources[source] = {"n": runs.HELD_OUT, "n_greedy": runs.HELD_OUT_GREEDY}
        sources[source] |= {measure: estimate(f"{source}/{measure}") for measure in MEASURES}
        sources[source]["greedy"] = estimate(f"{source}_greedy/accuracy")
    return sources


def collapsed(reward: Sequence[float], grad_norms: Sequence[float]) -> bool:
    """Tell whether training collapsed.

    It did where the mean reward of the last fifth of the steps is below that of the first fifth, or where a reward or
    a gradient norm is not finite. DeepSpeed logs such a norm as -1.
    """
    fifth = max(1, len(reward) // 5)
    is_finite = all(map(math.isfinite, reward)) and all(0 <= norm < math.inf for norm in grad_norms)
    return not is_finite or sum(reward[-fifth:]) < sum(reward[:fifth])


def thinned(values: Sequence[float]) -> list[float | None]:
    """Return the means of up to 20 equal stretches, to four digits; None for one without a finite value."""
    size = -(-len(values) // _CURVE_POINTS)
    stretches = [values[start : start + size] for start in range(0, len(values), size)]
    finite = [[value for value in stretch if math.isfinite(value)] for stretch in stretches]
    return [rounded(fmean(stretch)) if stretch else None for stretch in finite]


def rounded(value: float) -> float:
    """Return `value` to four digits."""
    return float(f"{value:.4g}")


def step_seconds(scalars: Scalars) -> dict[str, float]:
    """Return the median seconds of a step and of its parts, without the first step, which warms up."""
    names = {"timing/step_total": "step", "timing/generation": "generation", "timing/ppo_train": "update"}
    return {short: round(median(list(scalars[f"train/{name}"].values())[1:]), 3) for name, short in names.items()}
