"""Decides whether a parsed answer equals a parsed label. docs/rewards.md has the rules as a table.

Expressions are equal where they have one value at several points. Lists are compared without their order, tuples and
points with it. This part of the math reward runs in worker processes, and nothing in it is bounded in time.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

# math-verify reads 25% as 25 * _HUNDREDTH.
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
# A decimal is an exact value that was rounded to six places or more. Leading zeros are no digits.
_ROUNDING = sympy.Rational(5, 10**7)
_RELATIVE_ROUNDING = sympy.Rational(5, 10**5)
_ORDER = (sympy.LessThan, sympy.StrictLessThan, sympy.GreaterThan, sympy.StrictGreaterThan)


class Listing(NamedTuple):
    """Several values without an order, as written. `braced` says that they stood in braces."""

    items: tuple
    braced: bool


class Chain(NamedTuple):
    """Relations that were written in one, as in a = b = c."""

    relations: tuple


def equal(label: object, answer: object, label_braced: bool, answer_braced: bool) -> bool:
    """Return whether an answer equals a label. Both are what math-verify parses, or text that it does not.

    Letter case counts where the label or the answer has a letter in both cases. What stood in braces is a set.
    """
    if not isinstance(label, sympy.Basic | sympy.MatrixBase) or not isinstance(answer, sympy.Basic | sympy.MatrixBase):
        return isinstance(label, str) and isinstance(answer, str) and label.strip() == answer.strip() != ""
    if _spelled(label) == _spelled(answer) != "":
        return True
    is_cased = any(len({name.lower() for name in names}) < len(names) for names in map(_names, (label, answer)))
    return _equal(_read(label, label_braced, is_cased), _read(answer, answer_braced, is_cased))


def sides(answer: object) -> list:
    """Return the sides of an equation or of a chain of equations, else an empty list."""
    relations: Any = [answer]
    if isinstance(answer, Chain):
        relations = answer.relations
    elif isinstance(answer, sympy.And):
        relations = getattr(answer, "_unsorted_args", answer.args)
    if not relations or not all(isinstance(relation, sympy.Eq) for relation in relations):
        return []
    return [relations[0].lhs, *(relation.rhs for relation in relations)]


# --- reading what was parsed --------------------------------------------------------------------------------------


def _spelled(parsed: sympy.Basic | sympy.MatrixBase) -> str:
    r"""Return the word that a product of letters spells, because \text{even} is a symbol and even is a product."""
    letters = parsed.args if isinstance(parsed, sympy.Mul) else (parsed,)
    if not all(isinstance(letter, sympy.Symbol) or letter in (sympy.E, sympy.I) for letter in letters):
        return ""
    return "".join(str(letter) for letter in letters).lower()


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

    if isinstance(parsed, sympy.FiniteSet):
        return Listing(tuple(map(read, getattr(parsed, "_unsorted_args", parsed.args))), braced)
    if isinstance(parsed, sympy.Tuple):
        return tuple(map(read, parsed))
    if isinstance(parsed, sympy.And):
        return Chain(tuple(map(read, getattr(parsed, "_unsorted_args", parsed.args))))
    if isinstance(parsed, Relational) and any(isinstance(side, sympy.Set | sympy.Tuple) for side in parsed.args):
        return _Assigned(read(parsed.lhs), read(parsed.rhs)) if isinstance(parsed, sympy.Eq) else parsed
    # A derivative of a bare symbol would be zero, and f(x) has no value.
    opaque = {part: _symbol(str(part), is_cased) for part in parsed.atoms(AppliedUndef, sympy.Derivative)}
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(lambda cell: cell.xreplace(opaque | _symbols(cell, is_cased)))
    if isinstance(parsed, sympy.Eq) and _is_segment(parsed.lhs) and not parsed.rhs.free_symbols:
        return sympy.Eq(sympy.Symbol("".join(sorted(_spelled(parsed.lhs)))), read(parsed.rhs), evaluate=False)
    if isinstance(parsed, Relational):
        return parsed.func(*map(read, parsed.args), evaluate=False)
    return parsed.xreplace(opaque).xreplace(_symbols(parsed, is_cased))


class _Assigned(NamedTuple):
    """A name, and the set or the tuple that it is in or equals."""

    lhs: Any
    rhs: Any


def _is_segment(side: object) -> bool:
    r"""Return whether a side is a name of several letters, as in AB = 5 or \angle ABC = 60."""
    names = [factor.name for factor in getattr(side, "args", ()) if isinstance(factor, sympy.Symbol)]
    is_name = isinstance(side, sympy.Mul) and len(names) == len(side.args)
    return is_name and (names[0].isupper() or names[0].endswith("angle"))


def _symbols(parsed: sympy.Basic, is_cased: bool) -> dict:
    return {symbol: _symbol(symbol.name, is_cased) for symbol in parsed.atoms(sympy.Symbol)} | {
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
        label, answer = (x.doit() if getattr(x, "is_Matrix", False) else x for x in (label, answer))
        if isinstance(label, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
            return label.shape == answer.shape and _equal_in_order(tuple(label.flat()), tuple(answer.flat()))
        if isinstance(label, sympy.Expr) and isinstance(answer, sympy.Expr):
            return _same(label, answer)
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
        return bool(ends) and _same(label.start, answer.start) and _same(label.end, answer.end)
    label, answer = (part.xreplace(_exact(part)).doit() for part in (label, answer))
    return label == answer or label.symmetric_difference(answer).is_empty is True


# --- equations and inequalities -----------------------------------------------------------------------------------


def _equal_equations(label: Any, answer: Any) -> bool:
    expected, found = sides(label), sides(answer)
    if not found:
        # The left side only names the value, as in f(x) = 2x.
        return isinstance(expected[0], sympy.Symbol) and _equal(expected[-1], answer)
    if not expected:
        return any(_equal(label, value) for value in _values(found))
    if expected[0] == found[0] and _equal(expected[-1], found[-1]):
        return True
    label, answer = sympy.Add(expected[0], -expected[-1]), sympy.Add(found[0], -found[-1])
    return _ratio(label, answer) is not None or _same_solutions(label, answer)


def _values(found: list) -> list:
    """Return the values that an answer's equation gives: the last side, or each of several numbers.

    An equation in one variable that is not solved for it, such as x^2 = 2, gives none.
    """
    first, *others = found
    if not first.free_symbols and all(isinstance(side, sympy.Symbol) or not side.free_symbols for side in others):
        return [side for side in found if not side.free_symbols]  # 3 = x names its value too
    if len(first.free_symbols) == 1 and (
        not isinstance(first, sympy.Symbol | sympy.Function) or isinstance(first, sympy.exp)
    ):
        return []
    return others if all(not side.free_symbols for side in others) else others[-1:]


def _same_solutions(label: sympy.Expr, answer: sympy.Expr) -> bool:
    for symbol in sorted(label.free_symbols & answer.free_symbols, key=str):
        with contextlib.suppress(Exception):  # sympy solves few equations, and says so in many ways
            solutions = [sympy.solve(side.xreplace(_exact(side)), symbol) for side in (label, answer)]
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
    variables = [set().union(*(part.free_symbols for part in _parts(x))) for x in (label, answer)]
    if _has_order(label) and _has_order(answer) and variables[0] != variables[1]:
        return False
    return any(_equal_sets(a, b) for a in _solution_sets(label) for b in _solution_sets(answer))


def _same_relation(label: Any, answer: Any) -> bool:
    if not isinstance(label, Relational) or not isinstance(answer, Relational):
        return False
    if not isinstance(label, _ORDER) or not isinstance(answer, _ORDER):
        difference = (sympy.Add(x.lhs, -x.rhs) for x in (label, answer))
        return _ratio(*difference) is not None and type(label) is type(answer)
    # Both as something > 0, or >= 0.
    ratio = _ratio(*(sympy.Add(x.gts, -x.lts) for x in (label, answer)))
    is_strict = [isinstance(x, sympy.StrictLessThan | sympy.StrictGreaterThan) for x in (label, answer)]
    return ratio is not None and bool(ratio > 0) and is_strict[0] == is_strict[1]


def _parts(value: Any) -> list:
    if isinstance(value, Listing | Chain):
        return [part for item in value[0] for part in _parts(item)]
    return [value]


def _solution_sets(value: Any) -> Iterator[sympy.Set]:
    """Yield the sets that inequalities in one real variable may mean. A comma may be "or", and may be "and"."""
    if isinstance(value, sympy.Set):
        yield value
    elif len(set().union(*(part.free_symbols for part in _parts(value)))) == 1:
        real = {symbol: sympy.Symbol("x", real=True) for part in _parts(value) for symbol in part.free_symbols}
        sets = [
            part.xreplace(_exact(part)).xreplace(real).as_set()
            if isinstance(part, Relational)
            else sympy.FiniteSet(part)
            for part in _parts(value)
        ]
        if not isinstance(value, Chain):
            yield sympy.Union(*sets)
        if (both := sympy.Intersection(*sets)) and both.is_empty is not True:
            yield both


# --- expressions --------------------------------------------------------------------------------------------------


def _same(label: sympy.Expr, answer: sympy.Expr) -> bool:
    """Return whether two expressions have one value, or are p% and p."""
    if label == answer:
        return True
    # Many labels are bare numbers to "what percent". A share below 1 is none of them.
    if label.has(_HUNDREDTH) != answer.has(_HUNDREDTH) and (label.has(_HUNDREDTH) or (_size(label) or 0) >= 1):
        bare = [x.xreplace({_HUNDREDTH: sympy.Rational(1)}) for x in (label, answer)]
        if _same(*bare):
            return True
    # Decimals are rounded. They become exact, so no other difference is forgiven.
    rounded = label.has(sympy.Float) or answer.has(sympy.Float)
    label, answer = (_evaluated(x.xreplace(_exact(x))) for x in (label, answer))
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


def _exact(parsed: sympy.Basic) -> dict:
    return {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float) if number.is_finite} | {
        _HUNDREDTH: sympy.Rational(1, 100)
    }


def _evaluated(value: sympy.Expr) -> sympy.Expr:
    return value.doit() if value.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit) else value


def _at_points(label: sympy.Expr, answer: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield both values at points that depend on the symbols' names alone, the same in each run."""
    symbols = sorted(label.free_symbols | answer.free_symbols, key=str)
    steps = label.has(sympy.floor, sympy.ceiling, sympy.Mod) or answer.has(sympy.floor, sympy.ceiling, sympy.Mod)
    for i in range(40 if steps else 6):
        random_number = random.Random(f"{i}").randrange
        signs = (1, 1) if i == 0 else (-1, -1) if i == 1 else (-1, 1)
        values = [
            sympy.Rational(random_number(31, 4000 if steps else 400), 101) * signs[random_number(2)] for _ in symbols
        ]
        point = dict(zip(symbols, values, strict=True))
        yield label.evalf(25, subs=point), answer.evalf(25, subs=point)


def _is_zero(first: sympy.Expr, second: sympy.Expr) -> bool:
    size, difference = _size(first), _size(sympy.Add(first, -second))
    return size is not None and difference is not None and difference <= size * sympy.Rational(1, 10**15)


def _size(value: sympy.Expr) -> sympy.Expr | None:
    """Return a number's absolute value to 20 digits, or None where it has none."""
    size = sympy.Abs(value.evalf(20))
    return size if size.is_Float or size.is_Rational else None


def _ratio(first: sympy.Expr, second: sympy.Expr) -> sympy.Expr | None:
    """Return second / first where that is one real number other than 0, else None."""
    if first.free_symbols != second.free_symbols:
        return None
    first, second = (_evaluated(x.xreplace(_exact(x))) for x in (first, second))
    ratios = [b / a for a, b in _at_points(first, second) if a != 0]
    if not ratios or not all(_is_zero(ratios[0], ratio) for ratio in ratios[1:]):
        return None
    return ratios[0] if ratios[0].is_real and ratios[0] != 0 else None
