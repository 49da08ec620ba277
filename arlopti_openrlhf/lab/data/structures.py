"""Tell which Knights-and-Knaves puzzles are the same one, up to the order of the people and to trivial rewording.

A puzzle's form is the smallest of the relabellings that color refinement and individualization leave, as in canonical
labelling of graphs (McKay and Piperno, arXiv 1301.1493).
"""

from collections.abc import Iterator, Mapping, Sequence

Statement = tuple  # ("telling-truth" | "lying", person) or (connective, statement, ...)
Links = list[list[tuple[int, int]]]  # each person's: (number of the way, other person)

_OPPOSITE = {"telling-truth": "lying", "lying": "telling-truth"}
_COMMUTATIVE = ("and", "or", "<=>")


def canonical_form(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return a form that two puzzles share exactly where one is a retelling of the other.

    That is, with the people in another order, the sides of and, or and iff swapped, or a negated claim in place of the
    plain one ("is not a knave", "is a knight"). Sentences that mean the same by a law of logic differ, such as "if A
    then B" and "if not B then not A". Statement i is person i's.
    """
    plain = [_without_negation(statement) for statement in statements]
    # People who are not connected by what they say make puzzles of their own, which may be told in any order.
    groups: list[set[int]] = []
    for speaker, statement in enumerate(plain):
        group = {speaker, *(person for _, person in _mentions(statement))}
        joined = [other for other in groups if other & group]
        groups = [other for other in groups if other not in joined] + [group.union(*joined)]
    parts = []
    for members in map(sorted, groups):
        labels = {person: label for label, person in enumerate(members)}
        part = [_relabelled(plain[person], labels) for person in members]
        parts.append(min(_forms(part, _links(part), [0] * len(part))))
    form: list[Statement] = []
    for smallest in sorted(parts):
        shifted = range(len(form), len(form) + len(smallest))
        form += [_relabelled(statement, shifted) for statement in smallest]
    return tuple(form)


def _without_negation(statement: Statement) -> Statement:
    """Return a statement with "not a knave" read as "a knight", likewise the reverse, and no double negation."""
    kind, *parts = statement
    if kind in _OPPOSITE:
        return statement
    parts = [_without_negation(part) for part in parts]
    if kind == "not" and parts[0][0] in _OPPOSITE:
        return (_OPPOSITE[parts[0][0]], parts[0][1])
    if kind == "not" and parts[0][0] == "not":
        return parts[0][1]
    return (kind, *parts)


def _relabelled(statement: Statement, labels: Sequence[int] | Mapping[int, int]) -> Statement:
    """Return a statement about the people's labels, with the sides of a commutative connective in order."""
    kind, *parts = statement
    if kind in _OPPOSITE:
        return (kind, labels[parts[0]])
    parts = [_relabelled(part, labels) for part in parts]
    return (kind, *(sorted(parts) if kind in _COMMUTATIVE else parts))


def _mentions(statement: Statement, way: str = "") -> list[tuple[str, int]]:
    """Return each person that a statement mentions, with the way there: connectives, and the sides that matter."""
    kind, *parts = statement
    if kind in _OPPOSITE:
        return [(way + kind, parts[0])]
    sides = ("" if kind in _COMMUTATIVE else str(side) for side in range(len(parts)))
    return [found for part, side in zip(parts, sides, strict=True) for found in _mentions(part, f"{way}{kind}{side} ")]


def _links(statements: Sequence[Statement]) -> Links:
    """Return whom each person mentions and who mentions them. Ways are so far apart that any color can be added."""
    mentions = [_mentions(statement) for statement in statements]
    ways = {way: i for i, way in enumerate(sorted({way for found in mentions for way, _ in found}))}
    links: Links = [[] for _ in statements]
    for speaker, found in enumerate(mentions):
        for way, other in found:
            links[speaker].append((4 * ways[way] * len(statements), other))
            links[other].append((2 * (2 * ways[way] + 1) * len(statements), speaker))
    return links


def _forms(statements: Sequence[Statement], links: Links, colors: list[int]) -> Iterator[tuple[Statement, ...]]:
    """Yield the forms by all labels that agree with a coloring, which has the order of the labels to be."""
    people = range(len(statements))
    # Refine until people of one color have links of the same ways to the same colors.
    count = 0
    while True:
        looks = [(colors[i], *sorted([way + colors[other] for way, other in links[i]])) for i in people]
        ranks = {look: rank for rank, look in enumerate(sorted(set(looks)))}
        colors = [ranks[look] for look in looks]
        if len(ranks) in (count, len(colors)):
            break
        count = len(ranks)
    if len(ranks) == len(colors):
        form: list[Statement] = [()] * len(colors)
        for person, statement in enumerate(statements):
            form[colors[person]] = _relabelled(statement, colors)
        yield tuple(form)
        return
    # Tell each person of the first shared color apart from the others. Of several who may be swapped, one is enough.
    shared = min(color for color in colors if colors.count(color) > 1)
    tried: list[int] = []
    for person in people:
        if colors[person] == shared and not any(_are_twins(statements, person, other) for other in tried):
            tried.append(person)
            yield from _forms(statements, links, [2 * color + (i != person) for i, color in enumerate(colors)])


def _are_twins(statements: Sequence[Statement], one: int, other: int) -> bool:
    """Tell whether a puzzle stays the same when two people swap their places."""
    swapped = list(range(len(statements)))
    swapped[one], swapped[other] = other, one
    return all(_relabelled(statements[swapped[i]], swapped) == statement for i, statement in enumerate(statements))
