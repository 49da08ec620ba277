"""Compares an answer with its labels. This part of the math reward runs in worker processes.

math-verify finds and parses the answer; `math_equal` decides. Nothing here is bounded in time or memory, but the
processes are. Their template imports this module and fills its tables once, before it forks them.
"""

import functools
import logging
import re
from collections.abc import Callable, Set
from typing import NamedTuple

from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parser
from sympy import Basic, Expr, Float, Function, NumberSymbol

from arlopti_openrlhf.grading.math_equal import equal, sides
from arlopti_openrlhf.grading.math_text import BasedNumber, based_number, rewritten, with_decimals, with_formulas
from arlopti_openrlhf.grading.math_units import MULTIPLIER, split_unit, words

# Not part of a word or of a longer number.
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}(?!\w)")
_FORMULA = re.compile(r"(?<!\\)(\$\$?|\\\[|\\\()(.+?)(?<!\\)(\$\$?|\\\]|\\\))", re.DOTALL)
_MULTIPLIED = re.compile(rf"(\$|\\\]|\\\))[\s-]+((?:{MULTIPLIER.pattern})(?![a-zA-Z]))")
_CONGRUENCE = re.compile(r"(?:.*\\equiv)?(.*?)\\pmod\s*(?:\{[^{}]*\}|\d)\s*", re.DOTALL)
# math-verify's defaults, but for the units, which are ours.
_TARGETS = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
        )
    ),
    ExprExtractionConfig(),
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
# math-verify would write all letters in lower case, and `eval` plain expressions such as 1/2.
parser.latex2sympy = functools.partial(
    latex2sympy2.latex2sympy, conversion_config=latex2sympy2.ConversionConfig(lowercase_symbols=False)
)
parser.parse_expr_cached = functools.lru_cache(maxsize=20)(
    lambda text: parser.latex2sympy(text.replace("**", "^").rstrip(". "), normalization_config=None)
)


class _Reading(NamedTuple):
    """What a text may mean.

    parsed: expressions, and texts that math-verify does not parse.
    measures: the measures of the unit.
    braced: there are braces, so what is listed is a set.
    numbers: the sides of an equation as integers, or None for a side that is none.
    """

    parsed: list
    measures: Set[str]
    braced: bool
    numbers: list[BasedNumber | None]


def compare(answer: str, labels: list[str], boxed: bool) -> bool:
    """Return whether an answer equals any of the labels.

    An answer that does not parse equals none. Nor does one that contradicts itself (`43 = 42`), that words other than
    a unit follow, or that has another unit than the label (`math_units`).

    Args:
        answer: the content of a box, or a text that the answer is extracted from.
        labels: LaTeX, without dollars or with.
        boxed: which of the two the answer is.
    """
    label_words = frozenset().union(*map(words, labels))
    read = _read_answer(answer, label_words) if boxed else _read_text(answer, label_words)
    if "\\circ" not in answer and any(map(_contradicts_itself, read.parsed)):
        return False
    return any(_is_right(_read_label(label), read) for label in labels)


def _is_right(label: _Reading, answer: _Reading) -> bool:
    if label.measures and answer.measures and label.measures.isdisjoint(answer.measures):
        return False
    if (expected := label.numbers[-1]) and expected.base:
        has_digits = expected in answer.numbers or expected._replace(base=None) in answer.numbers
        values = {with_decimals("{}_{{{}}}".format(*number)) for number in answer.numbers if number and number.base}
        return has_digits and len(values) <= 1
    return any(equal(a, b, label.braced, answer.braced) for a in label.parsed for b in answer.parsed)


def _read_answer(answer: str, label_words: Set[str]) -> _Reading:
    answer = re.sub(r"(?<![\\.])[.,;:]\s*\Z", "", re.sub(r"(?<!\\)\$", "", answer).strip())
    answer = rewritten(answer).strip().removeprefix("=")
    if (congruence := _CONGRUENCE.fullmatch(answer)) and "pmod" not in label_words:
        answer = congruence[1]
    return _read(answer, label_words, "first_match")


@functools.lru_cache(maxsize=1024)
def _read_label(label: str) -> _Reading:
    if "$" not in label.replace("\\$", ""):
        return _read(rewritten(label), words(label), "any_match")
    parsed = _parse(_in_formulas(label.replace("\\$", ""), rewritten), "any_match")
    return _Reading(parsed, frozenset(), "\\{" in label, [None])


def _read(latex: str, label_words: Set[str], extraction_mode: str) -> _Reading:
    """Read LaTeX with its unit as a unit, and as the product that it also is."""
    numbers = [based_number(side) for side in latex.split("=")]
    if len(numbers) > 1:
        latex = with_decimals(latex)
    latex = _in_minutes(latex, label_words)
    currency = {"dollar"} if "\\$" in latex else set()
    latex = latex.replace("\\$", "")
    bare, measures = split_unit(latex, label_words)
    readings = (_parse(f"${text}$", extraction_mode) for text in dict.fromkeys((bare, latex)))
    return _Reading([part for parsed in readings for part in parsed], measures | currency, "\\{" in latex, numbers)


def _read_text(text: str, label_words: Set[str]) -> _Reading:
    last = _Reading([], frozenset(), False, [None])

    def read(formula: str) -> str:
        nonlocal last
        formula = _in_minutes(rewritten(formula), label_words)
        bare, measures = split_unit(formula, label_words)
        last = _Reading([], measures, "\\{" in formula, [based_number(side) for side in formula.split("=")])
        return bare

    parsed = _parse(_in_formulas(text, read), "first_match")
    # Where the formula does not parse, math-verify would look for a number in it.
    if not any(isinstance(part, Basic) for part in parsed):
        parsed = parsed + _parse(_in_formulas(_FORMULA.sub(" ", text), read), "first_match")
    return last._replace(parsed=parsed)


def _in_minutes(latex: str, label_words: Set[str]) -> str:
    """Return LaTeX with times of the day in minutes, where the label is one. They would be read as ratios."""
    if label_words.isdisjoint(("am", "pm")):
        return latex
    return re.sub(r"(\d+)(?:\\!)*:(?:\\!)*(\d\d)", r"\1 \\cdot 60 + \2", latex)


def _in_formulas(text: str, change: Callable[[str], str]) -> str:
    """Change the formulas of a text. What else is no plain number becomes one."""
    # What multiplies a formula may stand behind it, as in $17$ million.
    text = _MULTIPLIED.sub(r"\\text{ \2}\1", text)
    parts = _FORMULA.split(text)  # text, delimiter, formula, delimiter, text, and so on
    parts[::4] = (with_formulas(_without_exponents(part)) for part in parts[::4])
    parts[2::4] = map(change, parts[2::4])
    return "".join(parts)


def _parse(text: str, extraction_mode: str) -> list:
    """Return what math-verify extracts from a text: the expression where it parses, and its text."""
    text = _without_exponents(text)
    return parser.parse(text, _TARGETS, extraction_mode=extraction_mode, parsing_timeout=None)


def _contradicts_itself(answer: object) -> bool:
    """Return whether an answer equates two numbers that differ by more than decimals are rounded."""
    equated = sides(answer)
    return any(map(_differ, equated, equated[1:]))


def _differ(left: object, right: object) -> bool:
    pair = [side for side in (left, right) if isinstance(side, Expr)]
    # A function may take degrees, or another base of the logarithm.
    if len(pair) < 2 or not all(x.is_number and not x.has(Function) for x in pair):
        return False
    # Decimals are rounded, and π is given as 22/7.
    tolerance = 1e-2 if any(x.has(Float, NumberSymbol) for x in pair) else 1e-12
    first, second = (x.doit().evalf(20) for x in pair)
    return bool(abs(first - second) > tolerance * abs(second))


def _without_exponents(text: str) -> str:
    r"""Rewrite 4.5e33 as 4.5 \times 10^{33}, because LaTeX would read a product with Euler's number."""

    def as_latex(number: re.Match) -> str:
        before = text[: number.start()]
        inside = before.count("$") % 2 or any(before.rfind(f"\\{a}") > before.rfind(f"\\{b}") for a, b in ("[]", "()"))
        mantissa, exponent = number[0].lower().split("e")
        latex = f"{mantissa} \\times 10^{{{int(exponent)}}}"
        return latex if inside else f"${latex}$"

    return _SCIENTIFIC.sub(as_latex, text)


# The parser's tables are filled at first use.
compare("\\frac{1}{2}", ["\\sqrt{3} \\times 10^{2}"], boxed=True)
compare("The answer is 1/2.", ["(1, 2]"], boxed=False)
