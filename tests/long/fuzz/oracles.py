"""Makes answers that are known to be right or wrong, so that a grade can be checked and not only its form."""

import random
import re
from fractions import Fraction

_SPACES = (" ", "  ", "\n", "\t", " \n ")


def judged_kk(seed: str, solution: str) -> tuple[str, float]:
    """Return a response to a puzzle of two people, and the reward that Logic-RL's rule gives it."""
    rng = random.Random(seed)
    sentences = [f"({i}) {name} is a {role}" for i, name, role in re.findall(r"\((\d)\) (\w+) is a (\w+)", solution)]
    changes = (
        lambda text: text.replace("knave", "knight"),
        lambda text: text.replace("knight", "knave"),
        lambda text: text.upper(),
        lambda text: text.replace(" ", rng.choice(_SPACES)),
        lambda text: text.replace(" is a ", rng.choice((" is not a ", " is an ", " isa ", ": ", " is  a "))),
        lambda text: text + rng.choice((".", ",", " or a knave", " and a knight", "!", " (sure)")),
        lambda text: rng.choice(("x", "Not ", "I think ", "**", "")) + text,
    )
    for _ in range(rng.randrange(5)):
        place = rng.randrange(len(sentences)) if sentences else 0
        if rng.random() < 0.15:
            sentences = rng.choice((sentences[::-1], sentences[:-1], sentences + sentences[:1]))
        elif sentences:
            sentences[place] = rng.choice(changes)(sentences[place])
    parts = ["<think>", "thought", "</think>", "<answer>", rng.choice(("\n", ", ", " ")).join(sentences), "</answer>"]
    if rng.random() < 0.2:
        parts.insert(rng.randrange(len(parts)), rng.choice(("<think>", "</answer>", " ")))
    if rng.random() < 0.1:
        del parts[rng.randrange(len(parts))]
    response = "".join(parts)
    return response, _kk_reward(response, solution)


def judged_math(seed: str) -> tuple[str, str, float]:
    """Return a response, a label that is a fraction, and the score of the response."""
    rng = random.Random(seed)
    label = Fraction(rng.randrange(-400, 400), rng.choice((1, 1, 2, 3, 7, 8, 12, 40)))
    mistakes = (
        label,
        label,
        -label,
        label + 1,
        label * 10,
        label / 2,
        1 / label if label else Fraction(1),
        label + Fraction(1, 1000),
    )
    answer = rng.choice(mistakes)
    text = rng.choice((_as_fraction, _as_slash, _as_mixed, _as_decimal))(answer)
    # The flag says whether what is added changes the value.
    added, is_same = rng.choice(
        (("", True), ("\\text{ cm}", True), ("\\ \\mathrm{m}/\\mathrm{s}^2", True), ("\\text{ ordered pairs}", True))
        + (
            ("x", False),
            ("\\text{ thousand}", False),
            ("\\text{ maybe}", False),
            ("\\pi", answer == 0),
            ("^2 + 7", False),
        )
    )
    before = rng.choice(("", "x = ", "= ", "m + n = ", "\\approx ", "f(2) = "))
    box = rng.choice(
        ("\\boxed{%s}", "So it is $\\boxed{%s}$.", "\\[ \\boxed{ %s } \\]", "\\boxed{1}, no: \\boxed{%s}")
    )
    if added in ("x", "^2 + 7") and (answer == 0 or not text.isdigit()):
        added, is_same = "", True
    return box % (before + text + added), _as_fraction(label), float(is_same and answer == label)


def _kk_reward(response: str, solution: str) -> float:
    found = re.fullmatch(r"(?s).*?<think>.*?</think>.*?<answer>(.*?)</answer>.*?", response)
    if not found or any(response.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return -3.0
    answer = found[1].lower()
    people = [line.split() for line in solution.lower().splitlines()]  # "(1)", name, "is", "a", role
    if len(re.findall("knight|knave", answer)) != len(people):
        return -1.0
    stated = [re.search(rf"\b{name}\b\s+is\s+a\s+\b(knight|knave)\b", answer) for _, name, *_ in people]
    if not all(stated):
        return -1.0
    return 3.0 if all(role == claim[1] for claim, (*_, role) in zip(stated, people, strict=True)) else -0.5


def _as_fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return ("-" if value < 0 else "") + f"\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _as_slash(value: Fraction) -> str:
    return str(value)


def _as_mixed(value: Fraction) -> str:
    whole, rest = divmod(abs(value), 1)
    if not whole or not rest:
        return _as_fraction(value)
    return ("-" if value < 0 else "") + f"{whole}{_as_fraction(rest)}"


def _as_decimal(value: Fraction) -> str:
    """Return the decimals of a value, with those that repeat under a line."""
    whole, rest = divmod(abs(value.numerator), value.denominator)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    if rest:
        digits = f"{digits[: seen[rest]]}\\overline{{{digits[seen[rest] :]}}}"
    return ("-" if value < 0 else "") + str(whole) + (f".{digits}" if digits else "")
