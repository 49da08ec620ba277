"""Compares two answers with math-verify. This part of the math reward runs in worker processes.

Nothing here is bounded in time or memory, but the processes are. Their template imports this module and fills its
tables once, before it forks them.
"""

import functools
import logging
import re
from collections.abc import Set

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parser, verify
from sympy import Basic, Eq, Expr, Float, Function, NumberSymbol

from arlopti_openrlhf.grading.math_units import without_unit, words

# Not part of a word or of a longer number.
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}(?!\w)")
_FORMULAS = [
    re.compile(rf"(?<!\\)({left})(.+?)(?<!\\)({right})", re.DOTALL)
    for left, right in ((r"\$\$?", r"\$\$?"), (r"\\\[", r"\\\]"), (r"\\\(", r"\\\)"))
]
# A base or degrees, which math-verify drops.
_OTHER_SCALE = re.compile(r"\d\s*_|\\circ")
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
# math-verify would `eval` plain expressions such as 1/2.
parser.parse_expr_cached = functools.lru_cache(maxsize=20)(
    lambda text: parser.latex2sympy(text.replace("**", "^").rstrip(". "), normalization_config=None)
)


def compare(answer: str, labels: list[str], boxed: bool) -> bool:
    """Return whether an answer equals any of the labels.

    An answer that does not parse equals none. Nor does one that contradicts itself (`43 = 42`), or that words other
    than a unit follow (`math_units`).

    Args:
        answer: the content of a box, or a text that the answer is extracted from.
        labels: LaTeX, without dollars or with.
        boxed: which of the two the answer is.
    """
    answers = _parse_answer(answer, frozenset().union(*map(words, labels)), boxed)
    if not _OTHER_SCALE.search(answer) and any(_contradicts_itself(parsed) for parsed in answers):
        return False
    return any(
        verify(parsed, answers, timeout_seconds=None) or any(_same_number(a, b) for a in parsed for b in answers)
        for parsed in map(_parse_label, labels)
    )


def _parse_answer(answer: str, label_words: Set[str], boxed: bool) -> list:
    if boxed:
        answer = re.sub(r"\\?\$", "", answer).strip().removeprefix("=")
        answer = re.sub(r"(?<![\\.])[.,;:]\s*\Z", "", answer)
        if (congruence := _CONGRUENCE.fullmatch(answer)) and "pmod" not in label_words:
            answer = congruence[1]
        answer = f"${answer}$"
    # Where the formula does not parse, math-verify would look for a number in it.
    answers = _parse(answer, label_words, "first_match")
    if boxed or any(isinstance(parsed, Basic) for parsed in answers):
        return answers
    for formula in _FORMULAS:
        answer = formula.sub(" ", answer)
    return answers + _parse(answer, label_words, "first_match")


@functools.lru_cache(maxsize=1024)
def _parse_label(label: str) -> list:
    text = label.replace("\\$", "")  # the currency
    return _parse(text if "$" in text else f"${text}$", words(label), "any_match")


def _parse(text: str, label_words: Set[str], extraction_mode: str) -> list:
    """Return what math-verify extracts from a text: the expression where it parses, and its text."""
    for formula in _FORMULAS:
        text = formula.sub(lambda found: found[1] + without_unit(found[2], label_words) + found[3], text)
    return parser.parse(_without_exponents(text), _TARGETS, extraction_mode=extraction_mode, parsing_timeout=None)


def _contradicts_itself(answer: object) -> bool:
    """Return whether an answer equates two numbers that differ by more than decimals are rounded."""
    return isinstance(answer, Basic) and any(_differ(equation.lhs, equation.rhs) for equation in answer.atoms(Eq))


def _differ(left: Expr, right: Expr) -> bool:
    sides = (left, right)
    # A function may take degrees, or another base of the logarithm.
    if not all(x.is_number for x in sides) or any(x.has(Function) for x in sides):
        return False
    # Decimals are rounded, and π is given as 22/7.
    tolerance = 1e-2 if any(x.has(Float, NumberSymbol) for x in sides) else 1e-12
    first, second = (x.doit().evalf(20) for x in sides)
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


def _same_number(label: object, answer: object) -> bool:
    """Compare numbers with a decimal point by value. math-verify finds 8.7 * 10^8 and 870000000 different."""
    if not isinstance(label, Expr) or not isinstance(answer, Expr):
        return False
    if not all(x.is_number and x.is_real for x in (label, answer)):
        return False
    if not (label.has(Float) or answer.has(Float)):
        return False
    expected, found = label.evalf(20), answer.evalf(20)
    return bool(abs(expected - found) <= 1e-12 * abs(expected))


# The parser's tables are filled at first use.
compare("\\frac{1}{2}", ["\\sqrt{3} \\times 10^{2}"], boxed=True)
compare("The answer is 1/2.", ["(1, 2]"], boxed=False)
