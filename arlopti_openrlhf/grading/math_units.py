r"""Drops the unit at the end of an answer, as in `42 \text{ cm}`.

math-verify drops whatever text an answer ends with, and reads `42 \text{ maybe}` as 42.
"""

import re
from collections.abc import Set

# Units, each in all its spellings. The first is its name here.
_SPELLINGS = """
    nm nanometer nanometre; um micrometer micrometre micron; mm millimeter millimetre; cm centimeter centimetre; dm
    decimeter decimetre; m meter metre; km kilometer kilometre; in inch inches; ft foot feet; yd yard; mi mile;
    acre; ha hectare; cc; ml mL milliliter millilitre; L l liter litre; gal gallon; oz ounce; lb pound; mg
    milligram; g gm gram; kg kilogram; ton tonne; ms millisecond; s sec second; min minute; h hr hour; day; week;
    month; yr year; am; pm; mph; kmh kph; rpm; N newton; J joule; kJ kilojoule; eV; keV; MeV; GeV; cal calorie;
    kcal kilocalorie; erg; W watt; mW milliwatt; kW kilowatt; MW megawatt; V volt; mV millivolt; kV kilovolt; A amp
    ampere; mA milliampere; C celsius; F fahrenheit; K kelvin; Pa pascal; kPa; MPa; GPa; atm; bar; Hz hertz; kHz; MHz;
    GHz; T tesla; H henry; pF; nF; ns nanosecond; ps picosecond; dyn dyne; AU; pc parsec; kpc; Mpc; mol mole; rad
    radian; deg degree; ohm; bit; byte; cent; dollar USD; euro EUR
"""
CURRENCY = r"\$"
_UNITS = {spelling: unit.split()[0] for unit in _SPELLINGS.split(";") for spelling in unit.split()}
_FOLDED = {spelling.lower(): unit for spelling, unit in _UNITS.items() if len(spelling) > 1}
_POWERS = {"sq": "2", "square": "2", "squared": "2", "cu": "3", "cubic": "3", "cubed": "3"}
# What is counted, where it is no plural in -s, and what stands before it.
_COUNTED = frozenset(
    """
    of the per in a each unit people person men man women woman children child mice geese sheep fish dice vertices
    different distinct possible total ordered whole positive negative real old percent percentage
    """.split()
)
# They end like a plural noun, but are none.
_NO_NOUNS = frozenset(
    """
    always as becomes besides basis depends does doubtless else equals exists fails gives guess has hence his is less
    looks means minus otherwise perhaps plus regardless seems sometimes this thus times unless us versus was whereas
    yes
    """.split()
)
# They are no nouns either, after a number that a singular may follow.
_NO_SINGULARS = frozenset(
    """
    about almost although and approximately around because but circa either except false from half have maybe mean mod
    modulo more nearly neither none not only or over perhaps possibly probably quarter roughly squared than that then
    there true under unless until when where which with wrong two three four five six seven eight nine ten score
    """.split()
)
# They change the number. A quarter is counted too, and a month only ends like a fraction.
MULTIPLIER = re.compile(
    r"hal(?:f|ves)|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w*teen|\w*tie|hundred|thousand|\w*illion)ths?"
    r"|tens|hundreds?|thousands?|\w*illions?|dozens?|gross|lakhs?|lacs?|crores?|myriads?|googols?|permilles?"
)
_OTHER_MULTIPLIER = re.compile("[十百千万萬億亿兆半双]|тыс|сот|десят|миллион|миллиард|пол|hälft")
_SPACE = r"(?:\s|~|\\[ ,;:!]|\\q?quad(?![a-zA-Z]))*"
_COMMAND = r"\\(?:text(?:rm|it|bf|normal|sf)?|math(?:rm|bf|sf)|mbox|operatorname)\s*"
_POWER = r"\s*(?:\^\s*(?:(-?\d)|\{\s*(-?\d)\s*\}))?"
_TEXT_AT_END = re.compile(
    rf"(?<![\\\s~]){_SPACE}{_COMMAND}\{{((?:[^{{}}]|\^\{{-?\d\}})*)\}}{_POWER}{_SPACE}\.?{_SPACE}\Z"
)
_WORD_AT_END = re.compile(
    rf"(?<=[\d}})\]%\s~/])(?<!\\)({_SPACE})(?<![\\a-zA-Z])([a-zA-Z]+(?:/[a-zA-Z]+)?){_POWER}{_SPACE}\Z"
)
# What a noun in the singular may follow, as in 1 solution and 3/4 cup.
_SINGULAR = re.compile(
    r"(?:\A|=)\s*-?(?:1|0?\.\d+|\d+\s*/\s*\d+|\\[dt]?frac\s*(?:\d\s*\d|\{\s*\d+\s*\}\s*\{\s*\d+\s*\}))\s*\Z"
)
_VARIABLE = re.compile(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]")


def split_unit(answer: str, label_words: Set[str]) -> tuple[str, frozenset[str]]:
    r"""Return an answer without the unit at its end, and the measures of the unit with their powers.

    A unit is a measure (`42 cm`, `42\ \mathrm{m}/\mathrm{s}^2`) or a plural noun (`42 \text{ marbles}`), but no word
    that multiplies (`42 \text{ thousands}`). A word of the label is one too, because no answer is taken back with
    it. An answer that is nothing but a unit stays whole.

    Args:
        answer: LaTeX without dollars.
        label_words: the words of the labels, from `words`.
    """
    measures: frozenset[str] = frozenset()
    while match := _TEXT_AT_END.search(answer) or _WORD_AT_END.search(answer):
        rest = answer[: match.start()]
        if match.re is _TEXT_AT_END:
            text, is_unit = match[1], _is_unit(match[1], label_words, bool(_SINGULAR.search(rest)))
        else:
            text = match[2]
            is_apart = bool(match[1]) or rest[-1:].isspace() or rest[-1:] in ("~", "/")
            is_unit = _is_plain_unit(text, rest, is_apart)
        left = rest.rstrip().removesuffix("/")
        if not is_unit or not left.strip():
            break
        answer = left
        measures |= _measures(text, match.groups("")[-2] or match.groups("")[-1])
    return answer, measures


def words(text: str) -> frozenset[str]:
    """Return the words of a text, in lower case."""
    return frozenset(word.lower() for word in _words(text))


def _words(text: str) -> list[str]:
    return re.findall(r"(?<!\\)(?<![^\W\d_])[^\W\d_]+", text.replace(".", ""))


def _unit(word: str) -> str | None:
    """Return the name of a unit. The case of a single letter counts."""
    for spelling in (word, word.removesuffix("s"), word.removesuffix("es")):
        if unit := _UNITS.get(spelling) or _FOLDED.get(spelling.lower()):
            return unit
    return None


def _is_plain_unit(word: str, before: str, is_apart: bool) -> bool:
    # One letter is a variable, but after a number and a space. So are several right after a number, and a few letters
    # after an expression with variables, as in `3V + 2 Mm`.
    parts = word.split("/")
    is_number = not _VARIABLE.search(before.rpartition("=")[2])
    if not is_apart or min(map(len, parts)) == 1:
        return all(part in _UNITS for part in parts) and (len(word) > 1 or is_apart) and is_number
    return (is_number or min(map(len, parts)) > 3) and all(
        _unit(part)
        or part.lower() in _COUNTED
        or (len(part) > 3 and _is_counted(part, bool(_SINGULAR.search(before))))
        for part in parts
    )


def _is_unit(text: str, label_words: Set[str], singular: bool) -> bool:
    # A digit would be a second answer, but for a power.
    if not re.fullmatch(r"(?:[^\W\d_]+\d?|\^(?:-?\d|\{-?\d\})|[\s~./·*,()°-]|\\[ ,]|\\cdot )*", text):
        return False
    parts = _words(text)
    if parts and all(word in _POWERS for word in parts):
        return False
    return all(_unit(word) or _is_counted(word, singular) or _is_known(word, label_words) for word in parts)


def _is_known(word: str, label_words: Set[str]) -> bool:
    return len(word) > 1 and not {word.lower(), word.lower().removesuffix("s")}.isdisjoint(label_words)


def _is_counted(word: str, singular: bool = False) -> bool:
    word = word.lower()
    if not word.isascii():  # the nouns of other languages end in anything
        return not _OTHER_MULTIPLIER.match(word)
    if MULTIPLIER.fullmatch(word) or word in _NO_NOUNS or (singular and word in _NO_SINGULARS):
        return False
    return word in _COUNTED or word in _POWERS or (len(word) > 2 + (not singular) and (singular or word.endswith("s")))


def _measures(text: str, power: str) -> frozenset[str]:
    """Return the measures in a text, such as {"m", "s2"} for m/s^2. The power stands after the text."""
    tokens = re.findall(r"([a-zA-Z]+)\s*\^?\s*\{?-?(\d)?", text.replace(".", ""))
    spoken = next((_POWERS[word] for word, _ in tokens if word in _POWERS), "")
    last = len(tokens) - 1
    return frozenset(
        unit + (digit or (power.lstrip("-") if i == last else "") or spoken)
        for i, (word, digit) in enumerate(tokens)
        if (unit := _unit(word))
    )
