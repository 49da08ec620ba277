r"""Rewrites LaTeX that math-verify does not read, or reads wrongly, as `0.\overline{3}` and `101_{\text{two}}`."""

import re
from typing import NamedTuple

from arlopti_openrlhf.grading.math_units import MULTIPLIER

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty "}
    | {"°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap "}
    | {"∈": r"\in ", "∅": r"\emptyset ", "′": "'", "％": r"\%", "⟨": r"\langle ", "⟩": r"\rangle "}
    | dict.fromkeys("\u2009\u202f\u00a0", " ")
    | {power: f"^{digit}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {index: f"_{digit}" for digit, index in enumerate("₀₁₂₃₄₅₆₇₈₉")}
)
_GAP = r"(?:\s|~|\\[ ,;:!>]|\\q?quad(?![a-zA-Z]))+"
_TEXT = r"\\(?:text(?:rm|it|bf|sf|normal)?|math(?:rm|it|bf|sf)|mbox)\s*"
_FUNCTION = "ln|log|exp|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc"
_DECORATED = re.compile(r"\\(?:underline|uline|boldsymbol|bm|pmb|emph)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"{_TEXT}\{{([^{{}}a-zA-Z\\]*)\}}", r" \1 "),
        (rf"(?:{_TEXT}|\\operatorname\s*)\{{\s*({_FUNCTION})\s*\}}", r"\\\1 "),
        (rf"(?<![\\a-zA-Z])({_FUNCTION})(?=[\s(\d])", r"\\\1 "),
        (r"\A\s*\\(?:sim|cong)(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{\w*\}|\\(?:displaystyle|textstyle|Large|large|bf|rm)(?![a-zA-Z])", " "),
        (r"\\(?:approx|simeq|doteq)(?![a-zA-Z])|~=", " = "),
        (r"\\(?:log|ln)\s*_\s*(?:e|\{\s*(?:\\(?:mathrm|text)\s*)?\{?e\}?\s*\})(?![a-zA-Z])", r"\\ln "),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\\text\s*\{\s*OR\s*\}", r" \\text{ or } "),
        # {x | x < 3}
        (r"\\\{\s*[a-zA-Z]\s*(?:\\mid|\\vert|\||:)([^{}:|]*)\\\}", r"\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"<\s*=", r"\\le "),
        (r">\s*=", r"\\ge "),
        (r"(?<=[a-zA-Z)}])'+", r"^{\\prime}"),
        (r"((?:\d\u0305)+)", r"\\overline{\1}"),
        (r"\.(\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)\s*(?:\\[lc]?dots(?![a-zA-Z])|\.\.\.|…)", r".\1\\overline{\2\3}"),
        # Two factors, which would be read as the mixed number 2 3/1.
        (r"(?<![\w^}])(\d+)\s*(?=\(-?[\d.]+\))", r"\1 \\cdot "),
        (rf"{_TEXT}\{{[\s~]*(?:percent(?:age)?|pct|per\s+cent)[\s~]*\}}|(?<=\d)\s*per\s+cent\s*\Z", r"\\%"),
        (rf"{_GAP}(?=\\?%)", ""),
        # A percentage that is no plain number, such as 33\frac{1}{3}\%.
        (r"([^=,;]*[})])\s*\\?%\s*\Z", r"(\1) \\cdot 1\\%"),
    )
]
_REPEATED = r"(?:\\(?:overline|bar|dot)\s*(?:\{([\d\u0305]+)\}|(\d))(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\))"
_REPEATING = re.compile(rf"(?<![\w.])(\d*)\.(\d*)(?:\\[,!]|\s)*{_REPEATED}(?![\d(])")
_TWO_NUMBERS = re.compile(rf"(?<![\w.^])(\d+){_GAP}(?=[\d.])")
_THOUSANDS = re.compile(rf"(?<![\w.^])\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d)")
_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASES = {name: base for base, name in enumerate(_NAMES.split(), 2)} | {"sixteen": 16, "binary": 2, "decimal": 10}
_BASE = rf"(?:base)?[\s~}}-]*(\d+|{'|'.join(_BASES)})"
_BASED = re.compile(
    rf"\(?(?<![\w.])([\dA-Fa-f]*\d[\dA-Fa-f]*)\)?{_GAP[:-1]}*"
    rf"(?:_\s*(?:(\d)|\{{[\s(]*(?:{_TEXT}\{{)?[\s(]*{_BASE}[\s)]*\}}?[\s)]*\}}|{_TEXT}\{{[\s(]*{_BASE}[\s)]*\}})"
    rf"|(?:{_TEXT}\{{)?[\s(]*{_BASE.replace('(?:base)?', 'base')}[\s)]*\}}?)"
)
# What stands outside formulas: numbers with letters or words that belong to them.
_PLAIN_TERM = r"(?:\d+(?:\.\d+)?[a-zA-Z]?|[a-zA-Z])(?:\^\d+)?"
_MULTIPLIED = re.compile(rf"(?<![\w.$\\^])(\d[\d.,]*)[\s-]+((?:{MULTIPLIER.pattern})(?![a-zA-Z]))")
_PLAIN = re.compile(
    rf"(?<![\w.$\\^])-?\(?(?:{_PLAIN_TERM}\)?(?:\s*[-+*/^]\s*\(?{_PLAIN_TERM}\)?)+"
    r"|\d+(?:\.\d+)?[a-zA-Z](?:\^\d+)?)(?![\w$(])"
)


class BasedNumber(NamedTuple):
    """The digits of a number and its base, or None where none is written."""

    digits: str
    base: int | None


def rewritten(latex: str) -> str:
    """Return LaTeX as math-verify reads it rightly.

    Numbers with nothing but a space between them, other than thousands, become unreadable: math-verify adds them.
    """
    latex = latex.translate(_UNICODE)
    while (unwrapped := _DECORATED.sub(r" \1 ", latex)) != latex:
        latex = unwrapped
    for pattern, replacement in _REWRITES:
        latex = pattern.sub(replacement, latex)
    latex = _REPEATING.sub(_as_fraction, latex)
    latex = _BASED.sub(lambda match: "{}_{{{}}}".format(*_based(match)), latex)
    latex = re.sub(r"(?<![\w^}])(\d+)\s*_(?!\{\d+\})", r"\1 ? _", latex)
    latex = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), latex)
    return _TWO_NUMBERS.sub(lambda match: match[0] if _is_argument(latex, match) else f"{match[1]} ? ", latex)


def based_number(latex: str) -> BasedNumber | None:
    """Return the number that rewritten LaTeX is, where it is nothing else and an integer."""
    match = re.fullmatch(r"\s*([\dA-Fa-f]+)(?:_\{(\d+)\})?\s*", latex)
    if not match:
        return None
    return BasedNumber(match[1].lstrip("0").upper() or "0", int(match[2]) if match[2] else None)


def with_decimals(latex: str) -> str:
    """Return rewritten LaTeX with each number that has a base in base ten."""
    return re.sub(r"(?<!\w)([\dA-Fa-f]+)_\{(\d+)\}", _in_base_ten, latex)


def with_formulas(text: str) -> str:
    """Return text with dollars around what is no plain number, as 15n and 15 thousand, which would be read as 15."""
    text = _MULTIPLIED.sub(r"$\1\\text{ \2}$", text)
    return _PLAIN.sub(lambda match: f"${match[0]}$" if re.search("[a-zA-Z]", match[0]) else match[0], text)


def _as_fraction(match: re.Match) -> str:
    whole, fixed, *rest = (part or "" for part in match.groups())
    period = re.sub(r"\D", "", "".join(rest))
    nines = "9" * len(period) + "0" * len(fixed)
    numerator = int(whole + fixed + period) - int((whole + fixed) or "0")
    return f"\\frac{{{numerator}}}{{{nines}}}"


def _based(match: re.Match) -> tuple[str, int]:
    base = next(group for group in match.groups()[1:] if group)
    return match[1], _BASES.get(base) or int(base)


def _in_base_ten(match: re.Match) -> str:
    base = int(match[2])
    if not 2 <= base <= 36 or not all(int(digit, 36) < base for digit in match[1]):
        return match[0]
    return str(int(match[1], base))


def _is_argument(latex: str, match: re.Match) -> bool:
    r"""Return whether the first of two numbers is an argument or an index, as in \frac 1 2 or \log_2 3."""
    return bool(re.search(r"(?:\\[a-zA-Z]+|[_^])\s*\Z", latex[: match.start()]))
