"""Compares an answer with its labels. This part of the math reward runs in worker processes.

math-verify finds and parses the answer; `math_equal` decides. Nothing here is bounded in time or memory, but the
processes are. Their template imports this module and fills its tables once, before it forks them.
"""

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parser
from sympy import Basic, Eq, Expr, Function, MatrixBase

from arlopti_openrlhf.grading.math_chain import contradicts_itself, in_degrees
from arlopti_openrlhf.grading.math_equal import equal
from arlopti_openrlhf.grading.math_text import (
    FORMULA,
    BasedNumber,
    announced,
    based_number,
    choice,
    final_answer,
    is_ratio,
    leaves_work,
    plain,
    repeats,
    rewritten,
    spelled,
    with_decimals,
    with_formulas,
    with_times,
)
from arlopti_openrlhf.grading.math_units import CURRENCY, MULTIPLIER, split_unit, words

# Not part of a word or of a longer number.
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}(?!\w)")
_MULTIPLIED = re.compile(rf"(\$|\\\]|\\\))[\s-]+((?:{MULTIPLIER.pattern})(?![a-zA-Z]))")
_AND = re.compile(r"(?<![a-zA-Z])(and|or)(?![a-zA-Z])")
_LISTED = re.compile(r"[,;]|\\text\s*\{\s*(?:and|or)\s*\}")
# Letters that name a value, and would be read as a constant or as a product: e = 1/2, AB = 5.
_NAMED = re.compile(r"\A\s*(?:\\angle\s*|\|)?([eiIE]|[A-Z]{2,3})\|?\s*(?==)")
_PREFACE = re.compile(r"\A\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*answer[^{}]*\}\s*:?", re.IGNORECASE)
# A gap between two values, and not one after a comma or before a unit.
_QUAD = re.compile(r"(?<=[^\s,;:=])\s*\\q?quad(?![a-zA-Z])\s*(?=[^\s,;=\\}]|\\(?!text|math|q?quad|[pb]mod|[ ,;:!]))")
# Words between two numbers, which would be read as products of letters.
_BETWEEN = re.compile(r"\\(?:text|mathrm|mbox)\s*\{(?!\s*,?\s*(?:or|and)\s*\})[^{}]*[a-zA-Z][^{}]*\}(?=[^=,;]*\d)")
# Between two statements, and not in \lim_{x \to 0}.
_INDEX = re.compile(r"_\s*\{[^{}]*\}")
_ARROW = re.compile(r"\\(?:implies|iff|therefore|to|(?:[lL]ong)?(?:[lL]eft)?[rR]ightarrow)(?![a-zA-Z])|[→⇒⟹⇔∴]")
_ORDERED = re.compile(r"[<>]|\\(?:[lg]eq?|ne|in)(?![a-zA-Z])")
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
# Of an equation that it does not read, math-verify would take the last side.
parser.get_last_eq = str
parser.parse_expr_cached = functools.lru_cache(maxsize=20)(
    lambda text: parser.latex2sympy(text.replace("**", "^").rstrip(". "), normalization_config=None)
)


class _Reading(NamedTuple):
    """What a text may mean.

    parsed: expressions, and texts that math-verify does not parse.
    measures: the measures of the unit.
    braced: there are braces, so what is listed is a set.
    numbers: the sides of an equation as integers, or None for a side that is none.
    latex: the text that was read, before its numbers are written in base ten.
    """

    parsed: list
    measures: Set[str]
    braced: bool
    numbers: list[BasedNumber | None]
    latex: str = ""


class _Labels(NamedTuple):
    """What reading an answer depends on: the words of the labels, and what one of them is or has."""

    words: Set[str]
    has_ratio: bool
    has_base: bool


def compare(answer: str, labels: list[str], boxed: bool, question: Sequence[str] = ()) -> bool:
    """Return whether an answer equals any of the labels.

    An answer that does not parse equals none. Nor does one that contradicts itself (`43 = 42`), that words other than
    a unit follow, or that has another unit than the label (`math_units`). Nor does arithmetic that is left to do, if
    it stands among words or has only the numbers of the question.

    Args:
        answer: the content of a box, or a text that the answer is extracted from.
        labels: LaTeX, without dollars or with.
        boxed: which of the two the answer is.
        question: the `numbers` in it, for an answer without a box.
    """
    if not boxed and (found := final_answer(answer)) is not None:
        if leaves_work(found, labels) and repeats(found, question):
            return False
        answer, boxed = found, True
    elif not boxed and (said := announced(answer)) is not None:  # words, such as a name or a choice
        if any(plain(said) == plain(label) or _names(said) & _names(label) for label in labels):
            return True
    letter = choice(answer)[0] if boxed else ""
    if boxed and any(_names(answer) & _names(label) for label in labels):
        return True
    known = _Labels(
        frozenset().union(*map(words, labels)),
        any(map(is_ratio, labels)),
        any(number.base for label in labels if (number := _read_label(label).numbers[-1])),
    )
    answer = choice(answer)[1] if boxed else answer
    read = _read_answer(answer, known) if boxed else _read_text(answer, known)
    if any(contradicts_itself(part, read.latex) for part in read.parsed):
        return False
    if not boxed and any(isinstance(part, str) and leaves_work(part, labels) for part in read.parsed):
        return False
    labels = [label for label in labels if not letter or choice(label)[0] in ("", letter)]
    return any(_is_right(_read_label(label), read) for label in labels)


def _names(text: str) -> Set[str]:
    """Return the words that a text is, and the letter of a choice that it begins with."""
    return {spelled(text), choice(text)[0].lower()} - {""}


def _is_right(label: _Reading, answer: _Reading) -> bool:
    if label.measures and answer.measures and label.measures.isdisjoint(answer.measures):
        return False
    if (expected := label.numbers[-1]) and expected.base:
        has_digits = expected in answer.numbers or expected._replace(base=None) in answer.numbers
        values = {with_decimals("{}_{{{}}}".format(*number)) for number in answer.numbers if number and number.base}
        return has_digits and len(values) <= 1
    return any(equal(a, b, label.braced, answer.braced) for a in label.parsed for b in answer.parsed)


def _read_answer(answer: str, labels: _Labels) -> _Reading:
    answer = re.sub(r"(?<![\\.])[.,;:]\s*\Z", "", re.sub(r"(?<!\\)\$", "", answer).strip())
    answer = _QUAD.sub(", ", _PREFACE.sub("", rewritten(answer)).strip().removeprefix("="))
    if _ARROW.search(_INDEX.sub("", answer)) or any(
        split_unit(f"1 {text[0]}", labels.words)[0] != "1"
        for text in _BETWEEN.finditer(answer)
        if re.search(r"\d[^=,;]*\Z", answer[: text.start()])
    ):
        answer = "?"
    return _read(answer, labels)


@functools.lru_cache(maxsize=1024)
def _read_label(label: str) -> _Reading:
    known = _Labels(words(label), is_ratio(label), True)
    label = choice(label)[1]
    if "$" in label.replace("\\$", ""):
        parts = FORMULA.split(label)  # as in `_in_formulas`
        if re.search("[a-zA-Z]", _AND.sub("", "".join(parts[::4]))):
            # Of "odd $n$" and "all $n$ except $1$", no formula alone is the answer.
            return _Reading([], frozenset(), False, [None])
        parts[::4] = (_AND.sub(r"\\text{ \1 }", part) for part in parts[::4])
        label = "".join(parts[::2]).rstrip(". ")
    reading = _read(rewritten(label), known)
    # A label that is not read is met by its own letters alone (`math_reward`).
    is_read = "mod" not in label and any(isinstance(part, Basic | MatrixBase) for part in reading.parsed)
    return reading if is_read else reading._replace(parsed=[])


def _read(latex: str, labels: _Labels) -> _Reading:
    """Read LaTeX with its unit as a unit, and as the product that it also is."""
    latex = _NAMED.sub(r"x_{\1}", latex)
    numbers = [based_number(split_unit(side, labels.words)[0]) for side in latex.split("=")]
    latex = shown = with_times(latex, labels.has_ratio)
    if len(numbers) > 1 or not labels.has_base:
        latex = _in_base_ten(latex, numbers)
    currency = {"dollar"} if CURRENCY in latex else set()
    latex = latex.replace(CURRENCY, "")
    *named, last = _sides(latex)
    bare, measures = split_unit(last, labels.words)
    bare = "=".join([*(split_unit(side, labels.words)[0] for side in named), bare])
    if re.search(r"\\circ\s*\}?\s*\Z", bare):
        measures |= {"deg"}
    readings = map(_parse_latex, dict.fromkeys((bare, latex)))
    return _Reading(
        [part for parsed in readings for part in parsed], measures | currency, "\\{" in latex, numbers, shown
    )


def _read_text(text: str, labels: _Labels) -> _Reading:
    last = _Reading([], frozenset(), False, [None])

    def read(formula: str) -> str:
        nonlocal last
        formula = with_times(rewritten(formula), labels.has_ratio)
        bare, measures = split_unit(formula, labels.words)
        numbers = [based_number(side) for side in bare.split("=")]
        last = _Reading([], measures, "\\{" in formula, numbers, formula)
        return bare if labels.has_base else _in_base_ten(bare, numbers)

    parsed = _parse(_in_formulas(text, read), "first_match")
    # Where the formula does not parse, math-verify would look for a number in it.
    if not any(isinstance(part, Basic) for part in parsed):
        parsed = parsed + _parse(_in_formulas(FORMULA.sub(" ", text), read), "first_match")
    return last._replace(parsed=parsed)


def _in_base_ten(latex: str, numbers: list[BasedNumber | None]) -> str:
    """Return LaTeX in base ten, for a label without a base. 101_2 is no answer to it, by digits or by value."""
    is_based = len(numbers) == 1 and numbers[0] is not None and numbers[0].base not in (None, 10)
    return "?" if is_based else with_decimals(latex)


def _parse_latex(latex: str) -> list:
    r"""Parse LaTeX without dollars. What math-verify does not read is read with + and - for \pm, or side by side."""
    parsed = _expression(latex)
    if not isinstance(parsed[0], Basic | MatrixBase):
        if "\\pm" in latex:
            signs = itertools.product(_LISTED.split(latex), (("+", "-"), ("-", "+")))
            both = [part.replace("\\pm", a).replace("\\mp", b) for part, (a, b) in signs]
            found = [_expression(text)[0] for text in dict.fromkeys(both)]
            parsed = [FiniteSet(*found), *parsed] if all(isinstance(x, Expr | Eq) for x in found) else parsed
        elif len(parts := _sides(latex)) > 1 and not re.search(rf"[,;]|{_ORDERED.pattern}", latex):
            parsed = _chain(parts) + parsed
    if "\\circ" in latex:
        parsed = [in_degrees(part) if isinstance(part, Expr) else part for part in parsed]
    return parsed


def _expression(latex: str) -> list:
    """Return the expression that LaTeX is, where it parses, and its text."""
    text = normalize_latex(_without_exponents(f"${latex}$")[1:-1], _TARGETS[0].normalization_config)
    with contextlib.suppress(Exception):  # the parser says in many ways that it cannot
        return [parser.parse_latex_cached(text), text]
    return [text]


def _chain(parts: list[str]) -> list:
    """Read an equation side by side. Of a side that is not read, neither value nor contradiction is known."""
    sides = []
    for i, part in enumerate(parts):
        side = _expression(split_unit(part, frozenset())[0])[0]
        if not isinstance(side, Expr):
            is_call = re.fullmatch(r"\s*\\?\w+(?:\{\w+\})?\s*[(\[].*[)\]]\s*", part)
            if (re.search(r"\d", part) and not is_call) or i == len(parts) - 1:
                return []  # it may be a list of values
            side = Function(f"unread_{i}")(i)
        sides.append(side)
    relations = [Eq(a, b, evaluate=False) for a, b in itertools.pairwise(sides)]
    return [relations[0] if len(relations) == 1 else And(*relations)]


def _sides(latex: str) -> list[str]:
    """Return what stands between signs of equality that are in no braces or parentheses."""
    parts = [""]
    for piece in re.split("(=)", latex):
        if piece == "=" and all(parts[-1].count(a) == parts[-1].count(b) for a, b in ("{}", "()")):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _in_formulas(text: str, change: Callable[[str], str]) -> str:
    """Change the formulas of a text. What else is no plain number becomes one."""
    # What multiplies a formula may stand behind it, as in $17$ million.
    text = _MULTIPLIED.sub(r"\\text{ \2}\1", text)
    parts = FORMULA.split(text)  # text, delimiter, formula, delimiter, text, and so on
    parts[::4] = (with_formulas(_without_exponents(part)) for part in parts[::4])
    parts[2::4] = map(change, parts[2::4])
    return "".join(parts)


def _parse(text: str, extraction_mode: str) -> list:
    """Return what math-verify extracts from a text: the expression where it parses, and its text."""
    text = _without_exponents(text)
    return parser.parse(text, _TARGETS, extraction_mode=extraction_mode, parsing_timeout=None)


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
