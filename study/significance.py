"""Compute Student's intervals and paired tests over seeds, and Holm's correction."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import mpmath


class Interval(NamedTuple):
    """Holds a mean over seeds and the half-width of its 95% interval, which is nan with a single seed."""

    mean: float
    half: float
    n: int


class PairedTest(NamedTuple):
    """Holds differences to a baseline, paired by seed, and the two-sided p of Student's paired test."""

    difference: Interval
    p: float


def t_tail(t: float, degrees: int) -> float:
    """Return P(|T| > |t|) of Student's t with ν degrees of freedom.

    It is the regularized incomplete beta function I_{ν / (ν + t²)}(ν / 2, 1 / 2).
    """
    return float(mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True))


def t_quantile(degrees: int) -> float:
    """Return the t with P(|T| > t) = 0.05."""
    return float(mpmath.findroot(lambda t: t_tail(t, degrees) - 0.05, (1.9, 13), solver="anderson"))


def interval(values: Sequence[float]) -> Interval:
    """Return mean and 95% half-width of independent values, one per seed; nan if one of them is not finite."""
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, n)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Interval(fmean(values), half, n)


def paired_test(values: dict, baseline: dict) -> PairedTest | None:
    """Compare the values whose keys the baseline has too; None where there is no such key.

    Args:
        values: by seed, or whatever makes a pair.
        baseline: the same.
    """
    differences = [values[key] - baseline[key] for key in sorted(values.keys() & baseline.keys())]
    if not differences:
        return None
    found = interval(differences)
    if found.n < 2 or math.isnan(found.mean):
        return PairedTest(found, math.nan)
    error = stdev(differences) / math.sqrt(found.n)
    if not error:
        return PairedTest(found, 1.0 if not found.mean else 0.0)
    return PairedTest(found, t_tail(found.mean / error, found.n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values with Holm's correction for testing several hypotheses; a nan counts as no test."""
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
