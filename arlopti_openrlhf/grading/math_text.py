r"""Rewrites LaTeX that math-verify does not read, or reads wrongly, as `0.\overline{3}` and `101_{\text{two}}`."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from unicodedata import normalize

from arlopti_openrlhf.grading.math_units import MULTIPLIER, split_unit

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty "}
    | {"°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap "}
    | {"⁄": "/", "∕": "/", "。": "."}
    | {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}  # the wide forms of ASCII
    | {sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("⁄")) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    | dict.fromkeys("≃≅≊≋", r"\approx ")
    | {"∈": r"\in ", "∅": r"\emptyset ", "′": "'"}
    | dict.fromkeys("\u2009\u202f\u00a0", " ")
    | dict.fromkeys("€£¥₹", r"\$")
)
_RAISED = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+|[₀₁₂₃₄₅₆₇₈₉]+")
_GAP = r"(?:\s|~|\\[ ,;:!>]|\\q?quad(?![a-zA-Z]))+"
_TEXT = r"\\(?:text(?:rm|it|bf|sf|normal)?|math(?:rm|it|bf|sf)|mbox)\s*"
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
# An argument without braces. A command that has arguments itself is none.
_BARE = r"(\\pi(?![a-zA-Z])|\\[a-zA-Z]+(?![a-zA-Z]|\s*[{\[])|[^\s\\{}])"
_DECORATED = re.compile(r"\\(?:underline|uline|boldsymbol|bm|pmb|emph)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[hv]?phantom\s*\{[^{}]*\}", " "),
        (r"\\pounds(?![a-zA-Z])", r"\\$"),
        (rf"(\\[dtc]?frac)\s*{_BARE}", r"\1{\2}"),
        (rf"(\\[dtc]?frac\s*{_BRACED})\s*{_BARE}", r"\1{\2}"),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{(\1)}"),
        (rf"\^\s*(\\[dt]?frac\s*{_BRACED}\s*{_BRACED}|\\sqrt\s*(?:{_BRACED}|\d))", r"^{\1}"),
        (r"√\s*(\d+(?:\.\d+)?|[a-zA-Z]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"(?<![\\a-zA-Z])pi(?![^\W\d_])", r"\\pi "),
        (r"(?<=[\d)])!=", "! ="),
        (rf"{_TEXT}\{{((?:[^{{}}\\\w]|[\d_])*)\}}", r" \1 "),
        (r"\\(?:text)?color\s*\{\w*\}|\\(?:displaystyle|textstyle|Large|large|bf|rm|checkmark)(?![a-zA-Z])", " "),
        (
            r"\\(?:approx(?:eq)?|simeq|doteq|cong|triangleq|coloneqq|propto|[lL]eftrightarrow)(?![a-zA-Z])|~=|:=|==+",
            " = ",
        ),
        (r"\\(?:overset|stackrel)\s*\{[^{}]*\}\s*\{\s*=\s*\}", " = "),
        (r"(?<=\S)\s*\\sim(?![a-zA-Z])", " = "),
        (r"\\(?:vee|lor)(?![a-zA-Z])", r"\\text{ or }"),
        (r"\\(?:log|ln)\s*_\s*(?:e|\{\s*(?:\\(?:mathrm|text)\s*)?\{?e\}?\s*\})(?![a-zA-Z])", r"\\ln "),
        (rf"(?:\\q?quad)?\s*{_TEXT}\{{\s*(and|or)\s*\}}(?:\s*\\q?quad(?![a-zA-Z]))?", r" \\text{ \1 } "),
        (r"(?<=[a-zA-Z)}])'+", r"^{\\prime}"),
        # Two factors, which would be read as the mixed number 2 3/1.
        (r"(?<![\w^}])(\d+)\s*(?=\(-?[\d.]+\))", r"\1 \\cdot "),
        (rf"{_TEXT}\{{[\s~]*(?:percent(?:age)?|pct|per\s+cent)[\s~]*\}}|(?<=\d)\s*per\s*cent\s*\Z", r"\\%"),
        (rf"{_GAP}(?=\\?%)", ""),
        # A percentage that is no plain number, such as 33\frac{1}{3}\% and 1/2\%.
        (r"([^=,;]*(?:[})]|\d\s*/\s*\d+))\s*\\?%\s*\Z", r"(\1) \\cdot 1\\%"),
    )
]
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
_PLAIN_TERM = r"(?:\d+(?:\.\d+)?[a-zA-Z]?|[a-zA-Z])(?:\^(?:\d+|\{[^{}]*\}))?!*"
_MULTIPLIED = re.compile(rf"(?<![\w.$\\^])(\d[\d.,]*)[\s-]+((?:{MULTIPLIER.pattern})(?![a-zA-Z]))")
_PLAIN = re.compile(
    rf"(?<![\w.$\\^])-?\(?(?:{_PLAIN_TERM}\)?(?:\s*[-+*/^]\s*\(?{_PLAIN_TERM}\)?)+"
    r"|\d+(?:\.\d+)?(?:[a-zA-Z](?:\^\d+)?|\^(?:\d+|\{[^{}]*\})|!))(?![\w$(])"
)


# Of what `_work` returns: an operation between numbers, and what is not one.
_OPERATION = re.compile(r"[\d)][*+/^-]+\(*\d|\d\(|\)\(|\\sqrt")
_POWER_OF_TEN = re.compile(r"\*10\^-?\d+")
_FRACTION = re.compile(r"\W*?(\d{1,9})/(\d{1,9})\W*")
_PLAIN_NUMBER = re.compile(r"-?\d*\.?\d+\.?%?")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


class BasedNumber(NamedTuple):
    """The digits of a number and its base, or None where none is written."""

    digits: str
    base: int | None


def rewritten(latex: str) -> str:
    """Return LaTeX as math-verify reads it rightly.

    Numbers with nothing but a space between them, other than thousands, become unreadable: math-verify adds them.
    """
    latex = " ".join(_without_unicode(latex).splitlines())
    while (unwrapped := _DECORATED.sub(r" \1 ", latex)) != latex:
        latex = unwrapped
    for pattern, replacement in _REWRITES:
        latex = pattern.sub(replacement, latex)
    latex = _BASED.sub(lambda match: "{}_{{{}}}".format(*_based(match)), latex)
    latex = re.sub(r"(?<![\w^}])(\d+)\s*_(?!\{\d+\})", r"\1 ? _", latex)
    latex = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), latex)
    return _TWO_NUMBERS.sub(lambda match: match[0] if _is_argument(latex, match) else f"{match[1]} ? ", latex)


def _without_unicode(text: str) -> str:
    text = _RAISED.sub(lambda run: f"{'_' if '₀' <= run[0] <= '₉' else '^'}{{{normalize('NFKC', run[0])}}}", text)
    return text.translate(_UNICODE)


def based_number(latex: str) -> BasedNumber | None:
    """Return the number that rewritten LaTeX is, where it is nothing else and an integer."""
    match = re.fullmatch(r"\s*([\dA-Fa-f]+)(?:_\{(\d+)\})?\s*", latex)
    if not match:
        return None
    return BasedNumber(match[1].lstrip("0").upper() or "0", int(match[2]) if match[2] else None)


def with_decimals(latex: str) -> str:
    """Return rewritten LaTeX with each number that has a base in base ten. One that is none becomes unreadable."""
    return re.sub(r"(?<![\w\\])([\dA-Fa-f]*\d[\dA-Fa-f]*)_\{(\d+)\}", _in_base_ten, latex)


def with_formulas(text: str) -> str:
    """Return text with dollars around what is no plain number, as 15n and 15 thousand, which would be read as 15."""
    text = _MULTIPLIED.sub(r"$\1\\text{ \2}$", text)
    return _PLAIN.sub(lambda match: f"${match[0]}$" if re.search("[a-zA-Z!{]", match[0]) else match[0], text)


def _based(match: re.Match) -> tuple[str, int]:
    base = next(group for group in match.groups()[1:] if group)
    return match[1], _BASES.get(base) or int(base)


def _in_base_ten(match: re.Match) -> str:
    base = int(match[2])
    if not 2 <= base <= 36 or not all(int(digit, 36) < base for digit in match[1]):
        return f"{match[1]} ? _{{{base}}}"
    return str(int(match[1], base))


def _is_argument(latex: str, match: re.Match) -> bool:
    r"""Return whether the first of two numbers is an argument or an index, as in \frac 1 2 or \log_2 3."""
    return bool(re.search(r"(?:\\[a-zA-Z]+|[_^])\s*\Z", latex[: match.start()]))


# --- words, choices, times and ratios -----------------------------------------------------------------------------

_CHOICE = re.compile(
    rf"(?:{_TEXT}\{{\s*)?(?:(?:[Oo]ption|[Cc]hoice)\s+)?(?:\(\s*([A-J])\s*\)|([A-J])\s*[.):])((?:\s*\}})?)((?:{_GAP})?)"
    r"(?=[^+*/^_=,:\s])",
    re.DOTALL,
)
_SECOND_CHOICE = re.compile(r"(?<![\w\\(])\(?\s*[A-J]\s*(?:[.):]|\W*\Z)")
_TIME = re.compile(r"(?<![\d.:])(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?![\d:.])")
_COLON = re.compile(r"(?:\\!|\s)*:(?:\\!|\s)*")


def plain(text: str) -> str:
    r"""Drop what does not change a text's meaning: white space, dollars, a final full stop, `\left`, `\text`."""
    text = text.replace("\\$", "").strip().strip("$").rstrip(".")
    text = re.sub(rf"{_TEXT}\{{([^{{}}]*[a-zA-Z]{{2}}[^{{}}]*)\}}", r"\1", text)
    # A space between two digits may be one between two numbers.
    text = re.sub(r"(?<!\d)(?:\s|\\[,;:!])+|(?:\s|\\[,;:!])+(?!\d)|\\left(?![a-z])|\\right(?![a-z])", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def spelled(text: str) -> str:
    r"""Return the word or the words that a text is, in lower case, as for `\text{Yes.}` and `(C)`. Else nothing."""
    text = re.sub(rf"{_TEXT}(?=\{{)|\\left|\\right", "", text).replace("{", "").replace("}", "")
    word = " ".join(re.sub(_GAP, " ", text).strip("$().,;: ").lower().split())
    word = re.sub(r"\A(?:option|choice) (?=[a-j]\Z)", "", word)
    return word if word.replace(" ", "").isalpha() else ""


def choice(answer: str) -> tuple[str, str]:
    r"""Return the letter of a choice, if any, and what is chosen, as in `C. 36` and `\textbf{(C)}\ 36`."""
    match = _CHOICE.match(answer)
    rest = answer[match.end() :] if match else ""
    if not match or not (match[3] or match[4]) or _SECOND_CHOICE.search(rest):
        return "", answer
    # \text{(C) 36}
    return match[1] or match[2], rest.rstrip().removesuffix("}") if rest.count("}") > rest.count("{") else rest


def leaves_work(answer: str, labels: Iterable[str]) -> bool:
    r"""Return whether an answer is arithmetic that is left to do, as 12 * 12 for the label 144. Its last side counts.

    A fraction of no whole value, a percentage and 4.5 \times 10^{33} are numbers as they stand. So is all that the
    labels write, unless they are plain numbers.
    """
    if not all(_PLAIN_NUMBER.fullmatch(_work(label).replace(",", "")) for label in labels):
        return False
    last = _POWER_OF_TEN.sub("", _work(answer))
    if fraction := _FRACTION.fullmatch(last):
        return int(fraction[2]) != 0 and int(fraction[1]) % int(fraction[2]) == 0
    return bool(_OPERATION.search(last))


def repeats(answer: str, question: Sequence[str]) -> bool:
    """Return whether an answer has no other numbers than the question, whose `numbers` are given."""
    return not Counter(numbers(_work(answer))) - Counter(question)


def numbers(text: str) -> tuple[str, ...]:
    """Return the numbers of a text, without signs."""
    return tuple(_DIGITS.findall(text))


def _work(text: str) -> str:
    """Return the last side of a formula in one spelling: 2*3 for `2 \\times 3`, 6/2 for `\\frac{6}{2}`."""
    text = _without_unicode(text).rpartition("=")[2]
    text = re.sub(r"\\(?:times|cdot|div)(?![a-zA-Z])", "*", text)
    text = re.sub(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    return re.sub(r"[\s{}$]|\\(?:left|right|[,;:! ])", "", text)


def is_ratio(label: str) -> bool:
    """Return whether a label is a ratio or a fraction. A time such as 12:30 has two digits after its colon."""
    label = _COLON.sub(":", label)
    if time := _TIME.search(label):
        return math.gcd(int(time[1]), int(time[2])) == 1 and not time[2].startswith("0") and not time[3]
    return ":" in label or "/" in label or "frac" in label


def with_times(latex: str, has_ratio: bool) -> str:
    """Return LaTeX with times in seconds of a variable of their own, which equal nothing else.

    Args:
        latex: rewritten LaTeX.
        has_ratio: a label is a ratio. Then 10:15 is one too, else no ratio can be read.
    """
    latex = _COLON.sub(":", latex) if ":" in latex and "\\{" not in latex else latex
    if has_ratio:
        return latex
    latex = _TIME.sub(lambda time: f"{int(time[1]) * 3600 + int(time[2]) * 60 + int(time[3] or 0)} \\Xi_{{60}}", latex)
    return latex if "\\{" in latex else latex.replace(":", " ? ")


# --- the final answer of a text without a box ---------------------------------------------------------------------

FORMULA = re.compile(r"(?<!\\)(\$\$?|\\\[|\\\()(.+?)(?<!\\)(\$\$?|\\\]|\\\))", re.DOTALL)
_TAGS = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BOLD = re.compile(r"(?<![\w*)\]}])(?P<mark>\*{1,3}|__|`)(?=\S)(?P<inside>.+?)(?<=\S)(?P=mark)(?![\w*])")
# A last line of words, which hold no other number and list nothing, and what they end with in bold type.
_WORDS_AND_BOLD = re.compile(
    rf"^(?P<words>[^\d\n]*[^\W\d_]{{2}}(?<!\bor)(?<!\band)[,:]?)[^\S\n]+(?P<bold>{_BOLD.pattern}\.?)\Z", re.MULTILINE
)
_ANNOUNCED = re.compile(r"(?:answer|答案)(?:[^\S\n]{0,3}(?:is|are|:|：|=|是|为|為)){1,2}[^\S\n]*\n?", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:\.|。)(?=\s|\Z)|\n|\s*I hope")
_DELIMITERS = re.compile(r"(?<!\\)(?:\$\$?|\\[\[\]()])")
_TOKENS = re.compile(
    rf"(?:{_GAP}|{_TEXT}\{{[^{{}}]*\}}|\\begin.*?\\end\{{\w+\}}|\\[a-zA-Z]+|\\."
    r"|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|(?:(?i:and|or)|sqrt|pi)(?![a-zA-Z])|[\d_]|\W)*",
    re.DOTALL,
)


def final_answer(text: str) -> str | None:
    """Return the final answer of a text without a box, where it is nothing but a formula. Else None.

    It stands in answer tags, after "answer is" or "answer:", or is the last line, or what is bold at its end.
    """
    rest, is_announced = _last_words(text)
    bare, _ = split_unit(rest, frozenset())
    is_formula = _TOKENS.fullmatch(bare) or (bare.isalpha() and is_announced) or _MULTIPLIED.fullmatch(rest)
    return rest if is_formula and re.search(r"[\w\\]", rest) else None


def announced(text: str) -> str | None:
    """Return what stands in a text's answer tags or after its "answer is", be it words or a formula. Else None."""
    rest, is_announced = _last_words(text)
    return rest if is_announced else None


def _last_words(text: str) -> tuple[str, bool]:
    """Return where the final answer of a text without a box stands, and whether that is in tags or announced."""
    if tagged := _TAGS.findall(text):
        text = tagged[-1]
    text = FORMULA.sub(lambda formula: formula[0].replace("\n", " "), text.strip())
    text = _WORDS_AND_BOLD.sub(r"\g<words>\n\g<bold>", text)
    text = _BOLD.sub(r"\g<inside>", text)
    *_, before = None, *_ANNOUNCED.finditer(text)
    rest = text[before.end() :] if before else text.rpartition("\n")[2].lstrip("#")
    sentences = (rest[: end.start()] for end in _SENTENCE.finditer(rest))
    rest = next((sentence for sentence in sentences if sentence.strip() and _is_closed(sentence)), rest)
    return _DELIMITERS.sub("", rest).strip(), bool(tagged or before)


def _is_closed(text: str) -> bool:
    pairs = (("{", "}"), ("\\[", "\\]"))
    return text.count("$") % 2 == 0 and all(text.count(opening) == text.count(closing) for opening, closing in pairs)
