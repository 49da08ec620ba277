r"""Drops the unit at the end of an answer, as in `42 \text{ cm}`.

math-verify drops whatever text an answer ends with, and reads `42 \text{ maybe}` as 42.
"""

import re
from collections.abc import Set

_MEASURES = frozenset(
    """
    mm cm dm m km um nm in inch inches ft foot feet yd yard mi mile meter metre centimeter centimetre millimeter
    millimetre kilometer kilometre sq square cu cubic unit acre hectare cc ml l liter litre gal gallon oz ounce lb
    pound mg g gm kg gram kilogram ton tonne ms s sec second min minute h hr hour day week month yr year am pm mph kmh
    kph rpm n newton j kj joule ev kev mev gev cal kcal w kw watt mv v kv volt ma a amp ampere c f k pa kpa atm bar hz
    khz mhz ghz hertz t tesla mol mole rad radian deg degree celsius fahrenheit kelvin ohm pascal bit byte cent dollar
    usd eur euro rupee per
    """.split()
)
# What is counted, where it is no plural in -s, and what stands before it.
_COUNTED = frozenset(
    """
    of the people person men man women woman children child mice geese sheep fish dice vertices different distinct
    possible total ordered whole positive negative real
    """.split()
)
# They end like a plural noun, but are none.
_NO_NOUNS = frozenset(
    """
    always as becomes besides depends does doubtless else equals exists fails gives guess has hence his is less looks
    means minus otherwise perhaps plus regardless seems sometimes this thus times unless us versus was whereas yes
    """.split()
)
_POWER = r"\s*(?:\^\s*(?:-?\d|\{\s*-?\d\s*\}))?"
_SPACE = r"(?:\s|~|\\[ ,;:!]|\\quad(?![a-zA-Z]))*"
_COMMAND = r"\\(?:text(?:rm|it|bf|normal)?|math(?:rm|it|bf)|mbox)\s*"
_TEXT_AT_END = re.compile(rf"(?<![\\\s~]){_SPACE}{_COMMAND}\{{([^{{}}]*)\}}{_POWER}{_SPACE}\Z")
_WORD_AT_END = re.compile(rf"(?<=[\d}})\]%\s])(?<!\\)({_SPACE})(?<!\\)([a-zA-Z]+){_POWER}{_SPACE}\Z")
_NUMBER = re.compile(r"[-+\d.,{}!\\\s]+")
_PERCENT = re.compile(rf"{_COMMAND}\{{\s*(percent|percentage|pct)\s*\}}")


def without_unit(answer: str, label_words: Set[str]) -> str:
    r"""Return an answer without the unit at its end.

    A unit is a measure (`42 cm`, `42\ \mathrm{m}/\mathrm{s}^2`) or a plural noun (`42 \text{ marbles}`). A word of the
    label is one too, because nobody takes an answer back with it. An answer that is nothing but a unit stays whole.

    Args:
        answer: LaTeX without dollars.
        label_words: the words of the labels, from `words`.
    """
    answer = _PERCENT.sub(r" \1", answer)
    while found := _TEXT_AT_END.search(answer) or _WORD_AT_END.search(answer):
        rest = answer[: found.start()]
        if found.re is _TEXT_AT_END:
            is_unit = _is_unit(found[1], label_words)
        else:
            is_unit = _is_plain_unit(found[2].lower(), rest, rest[-1].isspace() or bool(found[1]), label_words)
        if not is_unit or not rest.replace("\\displaystyle", "").strip():
            break
        answer = rest.rstrip().removesuffix("/")
    return answer


def words(text: str) -> frozenset[str]:
    """Return the words of a text, in lower case."""
    return frozenset(word.lower() for word in re.findall(r"[a-zA-Z]+", text.replace(".", "")))


def _is_plain_unit(word: str, before: str, is_apart: bool, label_words: Set[str]) -> bool:
    if word not in _MEASURES or len(word) > 1:
        return word in _MEASURES
    # One letter is a variable, but after a number; right after it, where the label has it too, as in 10t.
    return bool(_NUMBER.fullmatch(before.rpartition("=")[2])) and (is_apart or word not in label_words)


def _is_unit(text: str, label_words: Set[str]) -> bool:
    # A digit would be a second answer, but for a power.
    if not re.fullmatch(r"(?:[^\W\d_]+\d?|\^-?\d|[\s~./·*,()°-]|\\[ ,])*", text):
        return False
    return all(
        (len(word) > 3 and word.endswith("s") and word not in _NO_NOUNS)
        or not {word, word.removesuffix("s")}.isdisjoint(_MEASURES | _COUNTED | label_words)
        for word in words(text)
    )
