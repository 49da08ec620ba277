"""Reads equations and chains of them, as in a = b = c: their sides, the values they give, and their contradictions.

A chain gives two values at most: its first side and its last, which agree to the digits shown. With more of them, an
answer could list guesses. This part of the math reward runs in worker processes.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

from arlopti_openrlhf.grading.math_values import evaluated, exact_numbers, is_undefined, same_value

# Relative difference of exact numbers that are not rational, such as \\sqrt{8} and 2\\sqrt{2}.
_NOISE = sympy.Rational(1, 10**25)


class Chain(NamedTuple):
    """Relations that were written in one, as in a = b = c."""

    relations: tuple


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


def is_name(side: sympy.Basic) -> bool:
    r"""Return whether a side names a value, as x, f(x), f'(x), f^{-1}(x) and \sin A do."""
    if isinstance(side, sympy.Pow):  # how math-verify reads f' and f^{-1}
        return isinstance(side.base, AppliedUndef) or "(" in str(getattr(side.base, "name", ""))
    if isinstance(side, TrigonometricFunction):
        side = side.args[0]
    return isinstance(side, sympy.Symbol | AppliedUndef | sympy.Derivative)


def values(found: list) -> list:
    """Return the values that an answer's equation gives.

    An equation that is not solved for a variable, such as x^2 = 2, gives none.
    """
    first, last = found[0], found[-1]
    if not first.free_symbols and all(isinstance(side, sympy.Symbol) or not side.free_symbols for side in found):
        found = [side for side in found if not side.free_symbols and not side.has(AppliedUndef)]  # 3 = x names one too
        return [*dict.fromkeys((found[0], found[-1]))] if found else []
    is_solved = isinstance(first, sympy.Symbol | sympy.Function) and not isinstance(first, sympy.exp)
    if len(first.free_symbols) == 1 and not is_solved and not is_name(first):
        return []
    if first.free_symbols & last.free_symbols and not first.has(AppliedUndef, sympy.Derivative):
        return [last] if same_value(first, last) else []  # an identity, or an equation
    others = [side for side in found[1:] if not side.has(AppliedUndef)]
    if others and all(not side.free_symbols for side in others):
        return [*dict.fromkeys((others[0], others[-1]))]
    return [last] if others else []


def contradicts_itself(parsed: object, latex: str) -> bool:
    """Return whether an answer, or an item of it, equates what is not equal.

    Functions are evaluated in radians or in degrees. What has no known value, as f(2), is no contradiction.

    Args:
        parsed: the answer.
        latex: its text, from which the digits of decimals are taken.
    """
    readings = (*_READINGS, _angle) if "\\circ" in latex else _READINGS
    items = [parsed, *parsed.atoms(sympy.And, sympy.Eq)] if isinstance(parsed, sympy.Basic) else []
    return any(
        not any(_agree([read(_with_constants(side)) for side in found], latex) for read in readings)
        for found in map(sides, items)
        if found
    )


def _with_constants(side: sympy.Basic) -> sympy.Basic:
    constants = {"i": sympy.I, "I": sympy.I, "e": sympy.E, "E": sympy.E}
    return side.xreplace({x: constants[x.name] for x in side.free_symbols if x.name in constants})


def _agree(found: list, latex: str) -> bool:
    numbers = [
        side for side in found if isinstance(side, sympy.Expr) and not side.free_symbols and not side.has(AppliedUndef)
    ]
    # A turn is no difference between two angles.
    turn = 360 if len(numbers) == latex.count("\\circ") == 2 else 0
    known = {(value, _tolerance(side, value, latex)) for side in numbers if (value := _value(side)) is not None}
    if not all(itertools.starmap(_near, ((a, b, turn) for a, b in itertools.combinations(known, 2)))):
        return False
    # In a chain, expressions in the same variables are one expression. x^2 = 2x is an equation.
    symbolic = [side for side in found if len(found) > 2 and getattr(side, "free_symbols", None)]
    return all(
        a.free_symbols != b.free_symbols or same_value(a, b)
        for a, b in itertools.pairwise(sorted(symbolic, key=lambda side: str(sorted(map(str, side.free_symbols)))))
        if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and not a.has(AppliedUndef) | b.has(AppliedUndef)
    )


def _near(first: tuple, second: tuple, turn: int) -> bool:
    (a, slack_a), (b, slack_b) = first, second
    if is_undefined(a) or is_undefined(b):
        return bool(a == b)
    difference = sympy.Abs(a - b)
    if turn:
        difference = min(difference % turn, -difference % turn)
    # A power such as 1.0^{99} would make room for any second answer.
    slack = min(max(slack_a, slack_b), max(1, sympy.Abs(b)) / 20)
    return bool(difference <= max(slack, 0 if difference.is_Rational else _NOISE * sympy.Abs(b)))


def _value(side: sympy.Expr) -> sympy.Expr | None:
    """Return a number's value to 40 digits, or None where it is not known."""
    value = evaluated(side.xreplace(exact_numbers(side))).doit()
    if not value.is_Rational and not is_undefined(value):
        value = value.evalf(40)
        real, imaginary = value.as_real_imag()
        if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
            return None if not is_undefined(value) else value
    return value


def _tolerance(side: sympy.Expr, value: sympy.Expr, latex: str) -> sympy.Expr:
    """Return by how much a side may be off, given that each decimal in it was rounded to the digits shown."""
    if is_undefined(value):
        return sympy.Integer(0)
    total = sympy.Integer(0)
    exact = exact_numbers(side)
    for number in side.atoms(sympy.Float):
        shown = [len(m[1]) for m in re.finditer(r"\d*\.(\d*)", latex) if m[0] != "." and float(m[0]) == abs(number)]
        moved = exact | {number: exact.get(number, number) + sympy.Rational(5, 10 ** (min(shown, default=15) + 1))}
        total += sympy.Abs(side.xreplace(moved).doit().evalf(20) - value)
    return total


def in_degrees(parsed: Any) -> Any:
    """Return an expression whose angles are plain numbers with these in degrees."""
    changes: dict = {}
    for angle in parsed.atoms(TrigonometricFunction):
        if angle.args[0].is_number and not angle.args[0].has(sympy.pi):
            changes[angle] = angle.func(angle.args[0] * sympy.pi / 180)
    for angle in parsed.atoms(InverseTrigonometricFunction):
        changes[angle] = angle * 180 / sympy.pi
    return parsed.xreplace(changes)


def _angle(side: sympy.Basic) -> sympy.Basic:
    side = in_degrees(side)
    return side * 180 / sympy.pi if isinstance(side, sympy.Expr) and side.has(sympy.pi) else side


_READINGS: tuple[Callable[[Any], Any], ...] = (lambda side: side, in_degrees)
