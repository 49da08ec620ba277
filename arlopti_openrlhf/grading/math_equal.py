"""Decides whether a parsed answer equals a parsed label. docs/rewards.md has the rules as a table.

Expressions are equal where they have one value at several points. Lists are compared without their order, tuples and
points with it. This part of the math reward runs in worker processes, and nothing in it is bounded in time.
"""

import contextlib
import itertools
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from arlopti_openrlhf.grading.math_chain import Chain, is_name, sides, values
from arlopti_openrlhf.grading.math_values import exact_numbers, ratio, same_value

_ORDER = (sympy.LessThan, sympy.StrictLessThan, sympy.GreaterThan, sympy.StrictGreaterThan)


class Listing(NamedTuple):
    """Several values without an order, as written. `braced` says that they stood in braces."""

    items: tuple
    braced: bool


def equal(label: object, answer: object, label_braced: bool, answer_braced: bool) -> bool:
    """Return whether an answer equals a label. Both are what math-verify parses, or text that it does not.

    Letter case counts where the label or the answer has a letter in both cases. What stood in braces is a set.
    """
    if not isinstance(label, sympy.Basic | sympy.MatrixBase) or not isinstance(answer, sympy.Basic | sympy.MatrixBase):
        return isinstance(label, str) and isinstance(answer, str) and label.strip() == answer.strip() != ""
    if any(
        part.has(sympy.zoo, sympy.nan) or (isinstance(part, sympy.Add) and part.has(sympy.oo))
        for part in (label, answer)
    ):
        return False
    is_cased = any(len({name.lower() for name in names}) < len(names) for names in map(_names, (label, answer)))
    return _equal(_read(label, label_braced, is_cased), _read(answer, answer_braced, is_cased))


# --- reading what was parsed --------------------------------------------------------------------------------------


def _names(parsed: sympy.Basic | sympy.MatrixBase) -> set[str]:
    letters = {symbol.name for symbol in parsed.atoms(sympy.Symbol)} | {
        f.func.__name__ for f in parsed.atoms(AppliedUndef)
    }
    constants = {sympy.E: "e", sympy.I: "I", sympy.EulerGamma: "gamma"}
    return letters | {name for constant, name in constants.items() if parsed.has(constant)}


def _read(parsed: Any, braced: bool, is_cased: bool) -> Any:
    """Return a parsed answer with one symbol for each name, and with its lists and chains as written."""

    def read(part: Any) -> Any:
        return _read(part, braced, is_cased)

    if isinstance(parsed, sympy.Union | sympy.Intersection | sympy.Complement):
        parsed, braced = parsed.doit(), True
    if isinstance(parsed, sympy.FiniteSet):
        return Listing(tuple(map(read, getattr(parsed, "_unsorted_args", parsed.args))), braced)
    if isinstance(parsed, sympy.Tuple):
        return tuple(map(read, parsed))
    if isinstance(parsed, sympy.And):
        return Chain(tuple(map(read, getattr(parsed, "_unsorted_args", parsed.args))))
    if isinstance(parsed, Relational) and any(isinstance(side, sympy.Set | sympy.Tuple) for side in parsed.args):
        return _Assigned(read(parsed.lhs), read(parsed.rhs)) if isinstance(parsed, sympy.Eq) else parsed
    roots = {power: _real_root(power) for power in parsed.atoms(sympy.Pow) if _real_root(power)}
    parsed = parsed.xreplace(roots) if roots else parsed
    # A derivative of a bare symbol would be zero, and f(x) has no value.
    opaque = {part: _symbol(str(part), is_cased) for part in parsed.atoms(AppliedUndef, sympy.Derivative)}
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(lambda cell: cell.xreplace(opaque | _symbols(cell, is_cased)))
    if isinstance(parsed, sympy.Eq) and _is_measured(parsed.lhs) and not parsed.rhs.free_symbols:
        return sympy.Eq(sympy.Symbol(str(parsed.lhs.doit()).lower()), read(parsed.rhs), evaluate=False)
    if isinstance(parsed, Relational):
        return parsed.func(*map(read, parsed.args), evaluate=False)
    return parsed.xreplace(opaque).xreplace(_symbols(parsed, is_cased))


def _real_root(power: sympy.Pow) -> sympy.Expr | None:
    """Return an odd root of a negative number as a real number, for sympy takes a complex one."""
    base, exponent = power.args
    if (
        not base.is_number
        or not base.is_negative
        or not exponent.is_Rational
        or exponent.q % 2 == 0
        or exponent.q == 1
    ):
        return None
    return sympy.Pow(-base, exponent) * (-1) ** (exponent.p % 2)


class _Assigned(NamedTuple):
    """A name, and the set or the tuple that it is in or equals."""

    lhs: Any
    rhs: Any


def _is_measured(side: object) -> bool:
    r"""Return whether a side stands for a length, an angle or a ratio, as AB, \angle ABC, |AB|, AB^2 and AB/CD do."""
    if isinstance(side, sympy.Abs) and isinstance(side.args[0], sympy.Symbol):
        return True
    side = side.args[0] if isinstance(side, sympy.Abs) else side
    if not isinstance(side, sympy.Mul | sympy.Pow):
        return False
    parts = [part for part in side.as_numer_denom() if part != 1]
    factors = [factor.as_base_exp() for part in parts for factor in sympy.Mul.make_args(part.doit())]
    names = [base.name for base, exponent in factors if isinstance(base, sympy.Symbol) and exponent.is_Integer]
    return len(names) == len(factors) > 1 and (names[0].isupper() or names[0].endswith("angle"))


def _symbols(parsed: sympy.Basic, is_cased: bool) -> dict:
    return {symbol: _symbol(symbol.name, is_cased) for symbol in parsed.free_symbols} | {
        sympy.EulerGamma: sympy.Symbol("gamma")
    }


def _symbol(name: str, is_cased: bool) -> sympy.Basic:
    if is_cased:
        return sympy.Symbol(name)
    return {"i": sympy.I, "e": sympy.E}.get(name.lower(), sympy.Symbol(name.lower()))


# --- comparing ----------------------------------------------------------------------------------------------------


def _equal(label: Any, answer: Any) -> bool:
    if isinstance(label, _Assigned) and isinstance(answer, _Assigned) and label.lhs != answer.lhs:
        return False
    if isinstance(label, _Assigned) or isinstance(answer, _Assigned):
        return _equal(*(x.rhs if isinstance(x, _Assigned) else x for x in (label, answer)))
    if _has_order(label) or _has_order(answer):
        return _equal_inequalities(label, answer)
    if isinstance(label, Listing) or isinstance(answer, Listing):
        return _equal_lists(label, answer)
    if sides(label) or sides(answer):
        return _equal_equations(label, answer)
    if (expected := _point(label)) and (found := _point(answer)):
        return _equal_in_order(expected, found)
    if isinstance(label, sympy.Set) and isinstance(answer, sympy.Set):
        return _equal_sets(label, answer)
    if isinstance(label, sympy.MatrixBase | sympy.Basic) and isinstance(answer, sympy.MatrixBase | sympy.Basic):
        label, answer = (sympy.Matrix(x.doit()) if getattr(x, "is_Matrix", False) else x for x in (label, answer))
        if isinstance(label, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
            return label.shape == answer.shape and _equal_in_order(tuple(label.flat()), tuple(answer.flat()))
        if isinstance(label, sympy.Expr) and isinstance(answer, sympy.Expr):
            return same_value(label, answer)
    return bool(label == answer)


def _equal_in_order(label: tuple, answer: tuple) -> bool:
    return len(label) == len(answer) and all(itertools.starmap(_equal, zip(label, answer, strict=True)))


def _point(value: Any) -> tuple | None:
    """Return the coordinates of what may be a point. math-verify reads (1, 2) as an interval."""
    if isinstance(value, sympy.Interval) and value.left_open and value.right_open:
        return value.start, value.end
    return value if type(value) is tuple else None


def _equal_lists(label: Any, answer: Any) -> bool:
    if isinstance(answer, Listing) and (point := _point(label)):
        named = {str(parts[0]): parts[-1] for item in answer.items if (parts := sides(item))}
        if len(named) == len(answer.items):
            return _equal_in_order(point, tuple(value for _, value in sorted(named.items())))
        return not answer.braced and _equal_in_order(point, answer.items)
    if isinstance(label, Listing) and (point := _point(answer)) and len(label.items) == len(point):
        return not label.braced and _equal_in_order(label.items, point)
    left = list(answer.items) if isinstance(answer, Listing) else [answer]
    expected = label.items if isinstance(label, Listing) else (label,)
    if len(left) != len(expected):
        return False
    for item in expected:
        found = next((i for i, other in enumerate(left) if _equal(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _equal_sets(label: sympy.Set, answer: sympy.Set) -> bool:
    if isinstance(label, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = (label.left_open, label.right_open) == (answer.left_open, answer.right_open)
        return bool(ends) and same_value(label.start, answer.start) and same_value(label.end, answer.end)
    label, answer = (part.xreplace(exact_numbers(part)).doit() for part in (label, answer))
    return label == answer or label.symmetric_difference(answer).is_empty is True


# --- equations and inequalities -----------------------------------------------------------------------------------


def _equal_equations(label: Any, answer: Any) -> bool:
    expected, found = sides(label), sides(answer)
    if not found:
        # The left side only names the value, as in f(x) = 2x.
        return is_name(expected[0]) and _equal(expected[-1], answer)
    if not expected:
        return any(_equal(label, value) for value in values(found))
    if expected[0] == found[0] and _equal(expected[-1], found[-1]):
        return True
    label, answer = sympy.Add(expected[0], -expected[-1]), sympy.Add(found[0], -found[-1])
    return ratio(label, answer) is not None or _same_solutions(label, answer)


def _same_solutions(label: sympy.Expr, answer: sympy.Expr) -> bool:
    if label.free_symbols != answer.free_symbols:
        return False
    for symbol in sorted(label.free_symbols, key=str):
        with contextlib.suppress(Exception):  # sympy solves few equations, and says so in many ways
            solutions = [sympy.solve(side.xreplace(exact_numbers(side)), symbol) for side in (label, answer)]
            if solutions[0] and all(isinstance(x, list) for x in solutions):
                return _equal_lists(*(Listing(tuple(x), False) for x in solutions))
    return False


def _has_order(value: Any) -> bool:
    if isinstance(value, Listing | Chain):
        return any(map(_has_order, value[0]))
    return isinstance(value, Relational) and not isinstance(value, sympy.Eq)


def _equal_inequalities(label: Any, answer: Any) -> bool:
    expected, found = (x.relations if isinstance(x, Chain) else (x,) for x in (label, answer))
    if len(expected) == len(found) and all(map(_same_relation, expected, found)):
        return True
    if label.__class__ is answer.__class__ is Chain and all(map(_same_relation, expected, reversed(found))):
        return True
    variables = [_variables(x) for x in (label, answer)]
    if any(len(names) > 1 for names in variables) or (
        _has_order(label) and _has_order(answer) and variables[0] != variables[1]
    ):
        return False
    solutions = [_solutions(x) for x in (label, answer)]
    return None not in solutions and _equal_sets(*solutions)


def _same_relation(label: Any, answer: Any) -> bool:
    if not isinstance(label, Relational) or not isinstance(answer, Relational):
        return False
    if not isinstance(label, _ORDER) or not isinstance(answer, _ORDER):
        difference = (sympy.Add(x.lhs, -x.rhs) for x in (label, answer))
        return ratio(*difference) is not None and type(label) is type(answer)
    # Both as something > 0, or >= 0.
    factor = ratio(*(sympy.Add(x.gts, -x.lts) for x in (label, answer)))
    is_strict = [isinstance(x, sympy.StrictLessThan | sympy.StrictGreaterThan) for x in (label, answer)]
    return factor is not None and bool(factor > 0) and is_strict[0] == is_strict[1]


def _variables(value: Any) -> set:
    if isinstance(value, Listing | Chain):
        return set().union(*map(_variables, value[0]))
    return value.free_symbols


def _solutions(value: Any) -> sympy.Set | None:
    """Return the set that inequalities in one real variable mean, or None where that is not clear.

    Listed ones hold together if they can, and else each by itself. If one implies another, they are two answers.
    """
    if isinstance(value, Listing | Chain):
        sets = list(map(_solutions, value[0]))
        if None in sets:
            return None
        both = sympy.Intersection(*sets)
        if isinstance(value, Chain):
            return both
        return sympy.Union(*sets) if both.is_empty else None if both in sets else both
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, Relational) and len(value.free_symbols) == 1:
        real = {symbol: sympy.Symbol("x", real=True) for symbol in value.free_symbols}
        return value.xreplace(exact_numbers(value)).xreplace(real).as_set()
    return sympy.FiniteSet(value) if isinstance(value, sympy.Expr) else None
