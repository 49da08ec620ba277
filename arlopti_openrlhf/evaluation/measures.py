"""Estimate accuracy, pass@k and the other measures of an evaluation, each with a 95% interval. Pure Python."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any, NamedTuple

Z_95 = 1.959964  # standard errors to each side of a mean that make a 95% interval, by the normal distribution


class Estimate(NamedTuple):
    """A mean over problems and its 95% interval. `standard_error` is clustered by problem."""

    value: float
    low: float
    high: float
    standard_error: float


class Response(NamedTuple):
    """What the measures need of one graded response."""

    score: float  # 1 right, 0 wrong, unless it is a grade of another range
    # Has the form that the prompt asks for (K&K's tags, a boxed answer). None where it is not known.
    well_formed: bool | None
    length: int  # tokens
    truncated: bool


def estimate_mean(values: Sequence[float], bounded: bool = True) -> Estimate:
    """Estimate a mean from one value per problem.

    Problems are independent. The samples of one problem are not, so each problem counts once.

    Args:
        values: (problems,).
        bounded: the values lie in [0, 1], as rates do. The interval is then Wilson's, at the number of independent
            samples that would have this standard error. It stays within [0, 1], and has a width even where all
            values are equal. Otherwise, and where a value lies outside [0, 1], the interval is the normal one.
    """
    n, p = len(values), fmean(values)
    error = stdev(values) / math.sqrt(n) if n > 1 else 0.0
    if not bounded or not all(0 <= value <= 1 for value in values):
        return Estimate(p, p - Z_95 * error, p + Z_95 * error, error)
    independent = p * (1 - p) / error**2 if error**2 and 0 < p < 1 else float(n)
    shrink = 1 + Z_95**2 / independent
    center = (p + Z_95**2 / (2 * independent)) / shrink
    half = Z_95 * math.sqrt(p * (1 - p) / independent + Z_95**2 / (4 * independent**2)) / shrink
    # Rounding must not put the mean outside its own interval.
    return Estimate(p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half)), error)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate pass@k without bias from n samples of which c are right: 1 - C(n - c, k) / C(n, k), for k ≤ n.

    Source: Chen et al., arXiv 2107.03374, Eq. 1.

    Raises:
        ValueError: k > n.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate_source(
    problems: Mapping[Any, Sequence[Sequence[Response]]], may_be_rates: bool = True
) -> dict[str, Estimate]:
    """Estimate every measure of one data source.

    Args:
        problems: the rows of each problem, with n responses each. A problem counts once, however often it is repeated.
        may_be_rates: false if the source is known to give other scores than those in [0, 1].

    Returns:
        `accuracy` (which is avg@n), `pass@k` for k = 2, 4, 8, ... and n, `well_formed` (if it is known), `truncated`,
        and `response_length` in tokens. Scores outside [0, 1], as a judge's from 1 to 5, do not say what is right:
        their mean is `score`, in the place of the first two.
    """
    rows = list(chain.from_iterable(problems.values()))
    n = len(rows[0])
    are_rates = may_be_rates and all(0 <= r.score <= 1 for row in rows for r in row)

    def mean(measure: Callable[[Sequence[Response]], float], bounded: bool = True) -> Estimate:
        return estimate_mean([fmean(map(measure, rows)) for rows in problems.values()], bounded)

    estimates = {"accuracy" if are_rates else "score": mean(lambda row: fmean(r.score for r in row), are_rates)}
    powers = [2**i for i in range(1, n.bit_length()) if 2**i <= n]
    for k in dict.fromkeys([*powers, n]) if are_rates else ():
        if k > 1:
            estimates[f"pass@{k}"] = mean(lambda row: pass_at_k(n, sum(r.score == 1 for r in row), k))  # noqa: B023
    if all(r.well_formed is not None for row in rows for r in row):
        estimates["well_formed"] = mean(lambda row: fmean(bool(r.well_formed) for r in row))
    estimates["truncated"] = mean(lambda row: fmean(r.truncated for r in row))
    estimates["response_length"] = mean(lambda row: fmean(r.length for r in row), bounded=False)
    return estimates
