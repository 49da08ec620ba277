"""Compares the values of two expressions at points. This part of the math reward runs in worker processes."""

import random
from collections.abc import Iterator

import sympy

# math-verify reads 25% as 25 * _HUNDREDTH.
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
# A decimal is an exact value that was rounded to six places or more. Leading zeros are no digits.
_ROUNDING = sympy.Rational(5, 10**7)
_RELATIVE_ROUNDING = sympy.Rational(5, 10**5)


def is_undefined(value: sympy.Basic) -> bool:
    r"""Return whether a value is infinite or undefined, as \frac{1}{0} is."""
    return bool(value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan))


def same_value(label: sympy.Expr, answer: sympy.Expr) -> bool:
    """Return whether two expressions have one value, or are p% and p.

    Infinity has a value. What else is infinite or undefined has none.
    """
    if is_undefined(label) or is_undefined(answer):
        return label == answer and label in (sympy.oo, -sympy.oo)
    if label == answer:
        return True
    # Many labels are bare numbers to "what percent". A share below 1 is none of them.
    if label.has(_HUNDREDTH) != answer.has(_HUNDREDTH) and (label.has(_HUNDREDTH) or (_size(label) or 0) >= 1):
        bare = [x.xreplace({_HUNDREDTH: sympy.Rational(1)}) for x in (label, answer)]
        if same_value(*bare):
            return True
    # Decimals are rounded. They become exact, so no other difference is forgiven.
    rounded = label.has(sympy.Float) or answer.has(sympy.Float)
    label, answer = (evaluated(x.xreplace(exact_numbers(x))) for x in (label, answer))
    if label.free_symbols or answer.free_symbols:
        return all(_is_zero(a, b) for a, b in _at_points(label, answer))
    difference = sympy.Add(label, -answer).doit()
    if difference.is_Rational and not rounded:
        return difference == 0
    size, difference = _size(label), _size(difference)
    if size is None or difference is None:
        return False
    if rounded and difference <= min(_ROUNDING, _RELATIVE_ROUNDING * size):
        return True
    return difference <= size * sympy.Rational(1, 10**60)


def exact_numbers(parsed: sympy.Basic) -> dict:
    return {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float) if number.is_finite} | {
        _HUNDREDTH: sympy.Rational(1, 100)
    }


def evaluated(value: sympy.Expr) -> sympy.Expr:
    return value.doit() if value.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit) else value


def _at_points(label: sympy.Expr, answer: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield both values at points that depend only on the symbols' names, the same in each run.

    If there are points at which all roots and logarithms are real, the others are left out, unless only one side has
    an absolute value: \\ln|x| and \\ln x differ at negative points.
    """
    symbols = sorted(label.free_symbols | answer.free_symbols, key=str)
    steps = label.has(sympy.floor, sympy.ceiling, sympy.Mod) or answer.has(sympy.floor, sympy.ceiling, sympy.Mod)
    points = []
    for i in range(40 if steps else 6):
        random_number = random.Random(f"{i}").randrange
        signs = (1, 1) if i == 0 else (-1, -1) if i == 1 else (-1, 1)
        values = [
            sympy.Rational(random_number(31, 4000 if steps else 400), 101) * signs[random_number(2)] for _ in symbols
        ]
        points.append(dict(zip(symbols, values, strict=True)))
    if label.has(sympy.Abs) == answer.has(sympy.Abs) and (inner := {*_arguments(label), *_arguments(answer)}):
        real = [point for point in points if all(x.evalf(25, subs=point).is_nonnegative for x in inner)]
        points = real or points
    for point in points:
        yield label.evalf(25, subs=point), answer.evalf(25, subs=point)


def _arguments(side: sympy.Expr) -> list[sympy.Expr]:
    """Return what stands under roots and in logarithms, if it holds a symbol."""
    found = [x.base for x in side.atoms(sympy.Pow) if not x.exp.is_integer]
    found += [log.args[0] for log in side.atoms(sympy.log)]
    return [x for x in found if x.free_symbols]


def _is_zero(first: sympy.Expr, second: sympy.Expr) -> bool:
    size, difference = _size(first), _size(sympy.Add(first, -second))
    return size is not None and difference is not None and difference <= size * sympy.Rational(1, 10**15)


def _size(value: sympy.Expr) -> sympy.Expr | None:
    """Return a number's absolute value to 20 digits, or None where it has none."""
    size = sympy.Abs(value.evalf(20))
    return size if size.is_Float or size.is_Rational else None


def ratio(first: sympy.Expr, second: sympy.Expr) -> sympy.Expr | None:
    """Return second / first where that is one real number other than 0, else None."""
    if first.free_symbols != second.free_symbols:
        return None
    first, second = (evaluated(x.xreplace(exact_numbers(x))) for x in (first, second))
    ratios = [b / a for a, b in _at_points(first, second) if a != 0]
    if not ratios or not all(_is_zero(ratios[0], ratio) for ratio in ratios[1:]):
        return None
    return ratios[0] if ratios[0].is_real and ratios[0] != 0 else None
