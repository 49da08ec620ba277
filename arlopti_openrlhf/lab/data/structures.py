"""Tell which Knights-and-Knaves puzzles are the same one, up to the order of the people and to trivial rewording.

A puzzle's form is the smallest of the relabellings that color refinement and individualization leave. The search skips
what a symmetry maps to what it has seen, as nauty does (McKay and Piperno, arXiv 1301.1493).
"""

from collections.abc import Mapping, Sequence

Statement = tuple  # ("telling-truth" | "lying", person) or (connective, statement, ...)

_OPPOSITE = {"telling-truth": "lying", "lying": "telling-truth"}
_COMMUTATIVE = ("and", "or", "<=>")


def canonical_form(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return a form that two puzzles share exactly where one is the other told anew.

    That is, with the people in another order, the sides of and, or and iff swapped, or a negated claim in place of the
    plain one ("is not a knave", "is a knight"). Sentences that mean the same by a law of logic differ, such as "if A
    then B" and "if not B then not A".

    Args:
        statements: statement i is person i's.
    """
    plain = [_plain(statement) for statement in statements]
    # People who are not connected by what they say make puzzles of their own, which may be told in any order.
    groups: list[set[int]] = []
    for speaker, statement in enumerate(plain):
        group = {speaker, *(person for _, person in _mentions(statement))}
        joined = [other for other in groups if other & group]
        groups = [other for other in groups if other not in joined] + [group.union(*joined)]
    form: list[Statement] = []
    for part in sorted(_Search(_among(sorted(group), plain)).smallest() for group in groups):
        labels = range(len(form), len(form) + len(part))
        form += [_relabelled(statement, labels) for statement in part]
    return tuple(form)


def _among(group: Sequence[int], statements: Sequence[Statement]) -> list[Statement]:
    """Return what the people of a group say, who speak of each other only, with the group counted from 0."""
    labels = {person: label for label, person in enumerate(group)}
    return [_relabelled(statements[person], labels) for person in group]


def _plain(statement: Statement) -> Statement:
    """Return a statement with "not a knave" read as "a knight", likewise the reverse, and no double negation."""
    kind, *parts = statement
    if kind in _OPPOSITE:
        return statement
    parts = [_plain(part) for part in parts]
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


class _Search:
    """Searches the labels of a puzzle's people that give the smallest form.

    Args:
        statements: plain ones.
    """

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.statements, self.people = statements, range(len(statements))
        mentions = [_mentions(statement) for statement in statements]
        ways = {way: i for i, way in enumerate(sorted({way for found in mentions for way, _ in found}))}
        # Person i's links are those whom i mentions and those who mention i. A number stands for the way. Numbers are
        # so far apart that any color can be added.
        self.links: list[list[tuple[int, int]]] = [[] for _ in self.people]
        for speaker, found in enumerate(mentions):
            for way, other in found:
                self.links[speaker].append((4 * ways[way] * len(statements), other))
                self.links[other].append((2 * (2 * ways[way] + 1) * len(statements), speaker))
        self.leaves: dict[tuple[Statement, ...], tuple[list[int], list[int]]] = {}  # by form: path, labels
        self.symmetries: list[list[int]] = []

    def smallest(self) -> tuple[Statement, ...]:
        """Return the smallest form of all labels that are visited."""
        self._search([0] * len(self.statements), [])
        return min(self.leaves)

    def _search(self, colors: list[int], path: list[int]) -> int:
        """Visit all labels that agree with a coloring, but for those that a symmetry makes of visited ones.

        Args:
            colors: of the people, in the order of the labels to be.
            path: the people who were told apart from others of their color on the way here.

        Returns:
            The length of the path to go on from.
        """
        colors = self._refined(colors)
        if len(set(colors)) == len(colors):
            return self._leaf(colors, path)
        shared = min(color for color in colors if colors.count(color) > 1)
        visited: list[int] = []
        for person in self.people:
            if colors[person] != shared or self._is_image(person, visited, path):
                continue
            visited.append(person)
            apart = [2 * color + (i != person) for i, color in enumerate(colors)]
            back = self._search(apart, [*path, person])
            if back < len(path):
                return back
        return len(path)

    def _refined(self, colors: list[int]) -> list[int]:
        """Return colors that differ wherever people's links do."""
        count = 0
        while True:
            looks = [(colors[i], *sorted([way + colors[other] for way, other in self.links[i]])) for i in self.people]
            ranks = {look: rank for rank, look in enumerate(sorted(set(looks)))}
            colors = [ranks[look] for look in looks]
            if len(ranks) in (count, len(colors)):
                return colors
            count = len(ranks)

    def _leaf(self, labels: list[int], path: list[int]) -> int:
        """Note the form that labels give, and return the length of the path to go on from."""
        form: list[Statement] = [()] * len(labels)
        for person, statement in enumerate(self.statements):
            form[labels[person]] = _relabelled(statement, labels)
        known_path, known = self.leaves.setdefault(tuple(form), (path, labels))
        if known is labels:
            return len(path)
        # Two labels with one form differ by a symmetry. It maps what is below the point where their paths part to
        # what was visited before, so nothing new is to be found there.
        self.symmetries.append([labels.index(known[person]) for person in self.people])
        return next(i for i, (one, other) in enumerate(zip(known_path, path, strict=True)) if one != other)

    def _is_image(self, person: int, visited: list[int], path: list[int]) -> bool:
        """Tell whether symmetries that leave a path as it is map one of the visited people to a person."""
        usable = [symmetry for symmetry in self.symmetries if all(symmetry[fixed] == fixed for fixed in path)]
        reached, new = set(visited), list(visited)
        while new:
            new = list({symmetry[i] for symmetry in usable for i in new} - reached)
            reached.update(new)
        return person in reached
