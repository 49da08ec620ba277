"""Count puzzles and their structures on both sides of the split, for each number of people.

    python -m study.structures

Prints a table in Markdown. A structure is a puzzle up to the order of the people, the sides of and, or and iff, and
"not a knave" for "a knight" (`lab.data.structures`).
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.data.structures import Statement, canonical_form
from arlopti_openrlhf.lab.scoring.tables import markdown_table

TRAIN, TEST = 4000, 256  # puzzles, as `prepare_data` makes
_COUNTED = 3  # people: all structures of more are too many to try


class Split(NamedTuple):
    """Counts the structures of one number of people. `None`: too many to count."""

    people: int
    train: int  # puzzles
    in_train: int  # structures
    test: int
    in_test: int
    in_both: int
    all_structures: int | None
    all_held_out: int | None


def splits(people: Sequence[int], train: int = TRAIN, test: int = TEST) -> list[Split]:
    """Return the counts of so many new training and held-out puzzles for each number of people."""
    return [_split(num_people, train, test) for num_people in people]


def _split(people: int, train: int, test: int) -> Split:
    sides = []
    for held_out, count in ((False, train), (True, test)):
        rng = random.Random(f"0/{people}/{held_out}")
        puzzles = itertools.islice(knights_knaves.generate(people, rng, held_out=held_out), count)
        sides.append({canonical_form(puzzle.statements) for puzzle in puzzles})
    possible = set(_all_structures(people)) if people <= _COUNTED else None
    return Split(
        people,
        train,
        len(sides[0]),
        test,
        len(sides[1]),
        len(sides[0] & sides[1]),
        None if possible is None else len(possible),
        None if possible is None else sum(map(knights_knaves.is_held_out, possible)),
    )


def _all_structures(people: int) -> Iterator[tuple[Statement, ...]]:
    """Yield the structures of all puzzles with one solution that the generator may draw, some of them repeatedly."""
    claims = [_claims(speaker, people) for speaker in range(people)]
    for statements in itertools.product(*claims):
        if len(knights_knaves.solutions(statements, people)) == 1:
            yield canonical_form(statements)


def _claims(speaker: int, people: int) -> list[Statement]:
    """Return what a person may say, without a second wording of the same."""
    atoms = [(kind, person) for person in range(people) for kind in ("telling-truth", "lying")]
    pairs = itertools.combinations(atoms, 2)
    return [
        *(atom for atom in atoms if atom[1] != speaker),
        *((kind, *pair) for pair in pairs for kind in ("and", "or", "<=>")),
        *(("->", *pair) for pair in itertools.permutations(atoms, 2)),
    ]


def table(found: Sequence[Split]) -> str:
    """Return a table in Markdown."""
    head = ["people", "training puzzles", "their structures", "held-out puzzles", "their structures"]
    lines = [[*head, "held-out structures in training", "all structures", "held out of these"]]
    lines += [["not counted" if count is None else str(count) for count in split] for split in found]
    return markdown_table(lines)


if __name__ == "__main__":
    print(table(splits(range(knights_knaves.MIN_PEOPLE, knights_knaves.MAX_PEOPLE + 1))))
