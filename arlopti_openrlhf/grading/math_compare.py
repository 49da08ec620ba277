"""Compares two answers with math-verify. This part of the math reward runs in worker processes.

Nothing here is bounded in time or memory, but the processes are. Their template imports this module and fills its
tables once, before it forks them.
"""

import functools
import logging
import re

from math_verify import parser, verify
from sympy import Expr, Float

# Not part of a word or of a longer number.
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}(?!\w)")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
# math-verify would `eval` plain expressions such as 1/2.
parser.parse_expr_cached = functools.lru_cache(maxsize=20)(
    lambda text: parser.latex2sympy(text.replace("**", "^").rstrip(". "), normalization_config=None)
)


def compare(answer: str, labels: list[str], boxed: bool) -> bool:
    """Return whether an answer equals any of the labels.

    Args:
        answer: the content of a box, or a text that the answer is extracted from.
        labels: LaTeX, without dollars or with.
        boxed: which of the two the answer is.
    """
    answers = _parse(_in_math(answer) if boxed else _without_exponents(answer))
    return any(
        verify(parsed, answers, timeout_seconds=None) or any(_same_number(a, b) for a in parsed for b in answers)
        for parsed in map(_parse_label, labels)
    )


@functools.lru_cache(maxsize=1024)
def _parse_label(label: str) -> list:
    return _parse(_in_math(label))


def _in_math(text: str) -> str:
    text = text.replace("\\$", "")  # the currency
    return _without_exponents(text if "$" in text else f"${text}$")


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


def _parse(text: str) -> list:
    return parser.parse(text, parsing_timeout=None)


# The parser's tables are filled at first use.
compare("\\frac{1}{2}", ["\\sqrt{3} \\times 10^{2}"], boxed=True)
compare("The answer is 1/2.", ["(1, 2]"], boxed=False)
