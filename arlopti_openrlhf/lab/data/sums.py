"""Make sums, products and differences of small numbers, which a small pretrained model gets right now and then."""

import hashlib
import random

from arlopti_openrlhf.lab.scoring.inputs import Row

_LARGEST = 12
_HELD_OUT_SHARE = 3  # one problem in three is held out, at every seed


def problems() -> list[tuple[str, int]]:
    """Return every problem, such as "7 - 3", with its answer. Nothing is negative."""
    numbers = range(1, _LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    return [
        *((f"{a} + {b}", a + b) for a, b in pairs),
        *((f"{a} - {b}", a - b) for a, b in pairs if a >= b),
        *((f"{a} * {b}", a * b) for a, b in pairs),
    ]


def is_held_out(problem: str) -> bool:
    """Tell whether a problem belongs to the test split, at every seed. 3 + 5 and 5 + 3 are on one side."""
    a, operation, b = problem.split()
    canonical = f"{operation} {sorted((a, b)) if operation != '-' else (a, b)}"
    return hashlib.sha256(canonical.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def generate_rows(count: int, *, held_out: bool, seed: int) -> list[Row]:
    """Return `count` rows of a split in random order. They come again once all of its problems were there."""
    split = [problem for problem in problems() if is_held_out(problem[0]) == held_out]
    rng = random.Random(f"{seed}/{held_out}")
    drawn: list[tuple[str, int]] = []
    while len(drawn) < count:
        drawn += rng.sample(split, len(split))
    return [
        {"prompt": [{"role": "user", "content": f"Calculate {problem}."}], "label": str(answer), "datasource": "math"}
        for problem, answer in drawn[:count]
    ]
