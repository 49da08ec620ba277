"""Student's intervals and tests equal tables and arithmetic by hand."""

import math

import pytest

from study import significance

NAN = pytest.approx(math.nan, nan_ok=True)


def test_students_t_is_that_of_the_tables():
    # Two-sided 5% points: 12.706 (ν = 1), 4.303, 2.776 (ν = 4).
    assert [round(significance.t_quantile(n), 3) for n in (1, 2, 4)] == [12.706, 4.303, 2.776]
    # ν = 1 is Cauchy's distribution: P(|T| > 1) = 1/2. ν = 2: P(|T| > t) = 1 - t / sqrt(2 + t²).
    assert significance.t_tail(1.0, 1) == pytest.approx(0.5)
    assert significance.t_tail(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6))


def test_paired_test_by_hand():
    # Seeds 0, 1, 2 have both: differences 0.1, 0.2, 0.3; mean 0.2, s = 0.1, standard error 0.1 / √3, t = 2 √3.
    test = significance.paired_test({0: 0.4, 1: 0.6, 2: 0.8, 3: 9.0}, {0: 0.3, 1: 0.4, 2: 0.5, 7: 0.0})
    assert test.difference == pytest.approx((0.2, 4.30265 * 0.1 / math.sqrt(3), 3), rel=1e-5)
    assert test.p == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(2 + 12))
    assert significance.paired_test({0: 1.0}, {1: 1.0}) is None
    assert significance.paired_test({0: 1.0}, {0: 0.5}) == ((0.5, NAN, 1), NAN)


def test_holm():
    # Sorted 0.01, 0.03, 0.04 by 3, 2, 1: 0.03, 0.06, and 0.04 raised to what comes before it.
    assert significance.holm([0.04, 0.01, math.nan, 0.03]) == [
        pytest.approx(0.06),
        pytest.approx(0.03),
        NAN,
        pytest.approx(0.06),
    ]
