"""Decides whether a parsed answer equals a parsed label. docs/rewards.md has the main rules as a table.

Expressions are equal where they have one value at several points. Lists are compared without their order, tuples and
points with it. This part of the math reward runs in worker processes, and nothing in it is bounded in time.
"""

import itertools
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from arlopti_openrlhf.grading.math_chain import Chain, is_name, sides, values
from arlopti_openrlhf.grading.math_values import exact_numbers, ratio, same_value


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
    if isinstance(parsed, sympy.Eq) and isinstance(parsed.rhs, sympy.Set | sympy.Tuple):
        return parsed if parsed.lhs.atoms(sympy.Number) else read(parsed.rhs)  # (x, y) = (1, 2)
    if isinstance(parsed, Relational) and any(isinstance(side, sympy.Set | sympy.Tuple) for side in parsed.args):
        return parsed
    # A derivative of a bare symbol would be zero, and f(x) has no value.
    opaque = {part: _symbol(str(part), is_cased) for part in parsed.atoms(AppliedUndef, sympy.Derivative)}
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(lambda cell: cell.xreplace(opaque | _symbols(cell, is_cased)))
    if isinstance(parsed, Relational):
        return parsed.func(*map(read, parsed.args), evaluate=False)
    return parsed.xreplace(opaque).xreplace(_symbols(parsed, is_cased))


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
    return bool(label == answer or label == getattr(answer, "reversed", None))


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


# --- equations ----------------------------------------------------------------------------------------------------


def _equal_equations(label: Any, answer: Any) -> bool:
    expected, found = sides(label), sides(answer)
    if not found:
        # The left side only names the value, as in f(x) = 2x.
        return is_name(expected[0]) and _equal(expected[-1], answer)
    if not expected:
        return any(_equal(label, value) for value in values(found))
    if expected[0] == found[0] and _equal(expected[-1], found[-1]):
        return True
    return ratio(sympy.Add(expected[0], -expected[-1]), sympy.Add(found[0], -found[-1])) is not None
