"""Estimate accuracy, pass@k and the other measures of an evaluation, each with a 95% interval. Pure Python."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

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


def estimate_source(problems: Sequence[Sequence[Response]]) -> dict[str, Estimate]:
    """Estimate every measure of one data source.

    Args:
        problems: the n responses to each problem.

    Returns:
        `accuracy` (which is avg@n), `pass@k` for k = 2, 4, 8, ... and n, `well_formed` (if it is known), `truncated`,
        and `response_length` in tokens. Scores outside [0, 1], as a judge's from 1 to 5, do not say what is right:
        their mean is `score`, in the place of the first two.
    """
    n = len(problems[0])
    are_rates = all(0 <= r.score <= 1 for problem in problems for r in problem)
    mean = estimate_mean([fmean(r.score for r in problem) for problem in problems], bounded=are_rates)
    estimates = {"accuracy" if are_rates else "score": mean}
    right = [sum(r.score == 1 for r in problem) for problem in problems]
    powers = [2**i for i in range(1, n.bit_length()) if 2**i <= n]
    for k in dict.fromkeys([*powers, n]) if are_rates else ():
        if k > 1:
            estimates[f"pass@{k}"] = estimate_mean([pass_at_k(n, c, k) for c in right])
    form = [[r.well_formed for r in problem if r.well_formed is not None] for problem in problems]
    if all(len(known) == len(problem) for known, problem in zip(form, problems, strict=True)):
        estimates["well_formed"] = estimate_mean([fmean(known) for known in form])
    estimates["truncated"] = estimate_mean([fmean(r.truncated for r in problem) for problem in problems])
    lengths = [fmean(r.length for r in problem) for problem in problems]
    estimates["response_length"] = estimate_mean(lengths, bounded=False)
    return estimates
