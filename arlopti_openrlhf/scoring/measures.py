"""What an evaluation says: accuracy, avg@n, pass@k and the rest, each with a 95% interval. Pure Python."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

_Z = 1.959964  # of a two-sided 95% interval


class Estimate(NamedTuple):
    """A mean over problems and its 95% interval; `standard_error` is clustered by problem."""

    value: float
    low: float
    high: float
    standard_error: float


class Response(NamedTuple):
    """One graded response."""

    score: float  # 1 right, 0 wrong
    well_formed: bool | None  # in the form that the prompt asks for: K&K's tags, a boxed answer; None: not known
    length: int  # tokens
    truncated: bool


def mean(values: Sequence[float], bounded: bool = True) -> Estimate:
    """The mean of one value per problem, which are independent; the samples within a problem are not.

    Args:
        values: (problems,).
        bounded: the values lie in [0, 1], as far as they are rates. The interval is then Wilson's, at the number of
            independent samples that would have this standard error: it stays within [0, 1], and is not a point where
            all values are equal. Otherwise, and for scores outside [0, 1], it is the normal one.
    """
    n, p = len(values), fmean(values)
    error = stdev(values) / math.sqrt(n) if n > 1 else 0.0
    if not bounded or not all(0 <= value <= 1 for value in values):
        return Estimate(p, p - _Z * error, p + _Z * error, error)
    n = p * (1 - p) / error**2 if error and 0 < p < 1 else n
    center = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return Estimate(p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half)), error)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimator of pass@k from n samples of which c are right: 1 - C(n - c, k) / C(n, k), for k ≤ n.

    Source: Chen et al., arXiv 2107.03374, Eq. 1. ValueError where k > n.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def measure(problems: Sequence[Sequence[Response]]) -> dict[str, Estimate]:
    """The measures of one data source.

    Args:
        problems: of each problem its responses, n of them.

    Returns:
        `accuracy` (which is avg@n), `pass@k` for k = 2, 4, 8, ... up to n, `well_formed` (where it is known),
        `truncated`, and `response_length` in tokens.
    """
    n = len(problems[0])
    right = [sum(r.score == 1 for r in problem) for problem in problems]
    form_is_known = all(r.well_formed is not None for problem in problems for r in problem)
    powers = [2**i for i in range(1, n.bit_length()) if 2**i <= n]
    return (
        {"accuracy": mean([fmean(r.score for r in problem) for problem in problems])}
        | {f"pass@{k}": mean([pass_at_k(n, c, k) for c in right]) for k in dict.fromkeys([*powers, n]) if k > 1}
        | ({"well_formed": mean([fmean(r.well_formed for r in p) for p in problems])} if form_is_known else {})
        | {
            "truncated": mean([fmean(r.truncated for r in problem) for problem in problems]),
            "response_length": mean([fmean(r.length for r in problem) for problem in problems], bounded=False),
        }
    )
