"""Generate, solve and explain Knights-and-Knaves puzzles of 2 to 8 people, in the published wording.

Knights always tell the truth and knaves always lie. Each person makes one statement. Statements are nested tuples, as
in the published data set (Logic-RL, arXiv 2502.14768; generator of arXiv 2410.23123), with people counted from 0:
`("telling-truth", 2)`, `("lying", 0)`, `("not", atom)`, `("and" | "or" | "->" | "<=>", atom, atom)`.

The seed determines everything, in any process. Nothing depends on hash() or on the order of a set.
"""

import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from arlopti_openrlhf.lab.data.structures import Statement, canonical_form

MIN_PEOPLE, MAX_PEOPLE = 2, 8

NAMES = tuple(
    (
        "Emma Liam Olivia Noah Ava James Sophia Lucas Mia Ethan Isabella Mason Charlotte Logan Amelia Jacob Harper "
        "Michael Evelyn Daniel Abigail Henry Emily Jackson Elizabeth Sebastian Sofia Aiden Avery Matthew Ella Samuel "
        "Scarlett David Grace Joseph Chloe Owen Victoria Jack Riley Alexander Aria Oliver Lily William Aurora Luke "
        "Zoey Benjamin Penelope"
    ).split()
)

# Qwen's ChatML. The answer begins inside `<think>`, as in the published prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
# The system text of Logic-RL's published prompts, to the letter. The double space and "and<answer>" are theirs.
INSTRUCTION = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and then "
    "provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here "
    "</answer>.  Now the user asks you to solve a logical reasoning problem. After thinking, when you finally reach "
    "a conclusion, clearly state the identity of each character within <answer> </answer> tags. i.e., <answer> (1) "
    "Zoey is a knight\n(2) ... </answer>."
)
ISLAND = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie."
)
QUESTION = "So who is a knight and who is a knave?"

# How the published puzzles report that {who} made the claim {said}. {Said} is the claim with a capital letter.
_SENTENCES = (
    "{who} said that {said}.",
    "{who} told you that {said}.",
    "{who} expressed that {said}.",
    '{who} said, "{Said}."',
    '{who} stated, "{Said}".',
    '{who} noted, "{Said}".',
    '{who} remarked, "{Said}".',
    '{who} commented, "{Said}".',
    '{who} was heard saying, "{Said}".',
    '{who} asserted: "{Said}".',
    'As {who} put it, "{Said}".',
    'According to {who}, "{Said}".',
    'In a statement by {who}: "{Said}".',
    'In {who}\'s words: "{Said}".',
    '"{Said}," {who} declared.',
    '"{Said}," {who} claimed.',
    '"{Said}," {who} mentioned.',
    '"{Said}" - {who}.',
)
# {connective: how the published puzzles join two claims by it, whether the two together hold}. "if" is ≤ of the two.
_CONNECTIVES: dict[str, tuple[str, Callable[[bool, bool], bool]]] = {
    "and": ("{0} and {1}", operator.and_),
    "or": ("{0} or {1}", operator.or_),
    "->": ("if {0} then {1}", operator.le),
    "<=>": ("{0} if and only if {1}", operator.eq),
}
_TEST_SHARE = 3  # one structure in three is held out; with 2 people there are only 249

# With 3 people, these are all. With 4 or more, trying all wrong assignments would take more room than a response has.
_MAX_WRONG_TRIALS = 7


@dataclass(frozen=True)
class Puzzle:
    """A puzzle with one solution. `solution[i]` is True where `names[i]` is a knight. `quiz` is the wording."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]
    solution: tuple[bool, ...]
    quiz: str

    @property
    def solution_text(self) -> str:
        """Return the label in the published form, as in "(1) Zoey is a knight\\n(2) Liam is a knave"."""
        return "\n".join(
            f"({number}) {name} is a {_role(knight)}"
            for number, (name, knight) in enumerate(zip(self.names, self.solution, strict=True), start=1)
        )

    @property
    def datasource(self) -> str:
        """Return the name that results are grouped by, such as "kk_3ppl" for three people."""
        return datasource(len(self.names))


def datasource(num_people: int) -> str:
    """Return the name of the puzzles of `num_people` people in data sets and result tables."""
    return f"kk_{num_people}ppl"


def is_true(statement: Statement, knights: Sequence[bool]) -> bool:
    """Tell whether a statement holds where `knights[i]` says that person i is a knight. ValueError for another one."""
    kind, *parts = statement
    if kind in _CONNECTIVES:
        return _CONNECTIVES[kind][1](*(is_true(part, knights) for part in parts))
    if kind == "not":
        return not is_true(parts[0], knights)
    if kind not in ("telling-truth", "lying"):
        raise ValueError(f"not a statement of a Knights-and-Knaves puzzle: {statement!r}")
    return knights[parts[0]] == (kind == "telling-truth")


@lru_cache(maxsize=MAX_PEOPLE)
def _assignments(num_people: int) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(bool(code >> person & 1) for person in range(num_people)) for code in range(2**num_people))


@lru_cache(maxsize=1 << 16)
def _truth_table(statement: Statement, num_people: int) -> int:
    # Bit c tells whether the statement holds in assignment c, so a few integer operations solve a puzzle.
    return sum(is_true(statement, knights) << code for code, knights in enumerate(_assignments(num_people)))


def solutions(statements: Sequence[Statement], num_people: int) -> list[tuple[bool, ...]]:
    """Return all of the 2 ** num_people assignments in which exactly the knights' statements are true.

    Statement i is person i's. ValueError where there is not one statement per person.
    """
    if len(statements) != num_people:
        raise ValueError(f"{len(statements)} statements for {num_people} people: each person makes one")
    possible = 2 ** (2**num_people) - 1
    for person, statement in enumerate(statements):
        speaker = _truth_table(("telling-truth", person), num_people)
        possible &= ~(speaker ^ _truth_table(statement, num_people))
    return [knights for code, knights in enumerate(_assignments(num_people)) if possible >> code & 1]


def is_held_out(statements: Sequence[Statement]) -> bool:
    """Tell whether puzzles of this structure belong to the test split, as about one structure in three does.

    The split depends on the puzzle's `canonical_form` alone, not on the seed. So no training puzzle is ever in the
    test split with other names, its people in another order, or a claim trivially reworded. The splits stay disjoint
    across seeds and counts.
    """
    digest = hashlib.sha256(repr(canonical_form(statements)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _TEST_SHARE == 0


def generate(
    num_people: int, rng: random.Random, *, held_out: bool | None = None, names: Sequence[str] = NAMES
) -> Iterator[Puzzle]:
    """Yield puzzles of 2 to 8 people without end, each with exactly one solution.

    `rng` is the only source of chance, so the same seed gives the same puzzles in every process. They are of the test
    split, of the training split (False), or of both (None). ValueError for another number of people, or too few names.
    """
    if not MIN_PEOPLE <= num_people <= MAX_PEOPLE:
        raise ValueError(f"num_people must be in [{MIN_PEOPLE}, {MAX_PEOPLE}], got {num_people}")
    if len(names) < num_people:
        raise ValueError(f"{num_people} people need as many names, got {len(names)}")
    while True:
        statements = tuple(_draw_statement(speaker, num_people, rng) for speaker in range(num_people))
        found = solutions(statements, num_people)
        if len(found) == 1 and (held_out is None or is_held_out(statements) == held_out):
            people = tuple(rng.sample(names, num_people))
            yield Puzzle(people, statements, found[0], _quiz(people, statements, rng))


def _draw_statement(speaker: int, num_people: int, rng: random.Random) -> Statement:
    # The published mixture has a plain claim, a negated one and the four connectives, equally often. A plain claim is
    # never about the speaker: "I am a knight" says nothing, and nobody can say "I am a knave".
    kind = rng.choice(("plain", "not", *_CONNECTIVES))
    if kind in _CONNECTIVES:
        left, right = rng.sample(range(2 * num_people), 2)
        return (kind, _atom(left), _atom(right))
    other = rng.randrange(num_people - 1)
    claim = _atom(2 * (other + (other >= speaker)) + rng.randrange(2))
    return claim if kind == "plain" else ("not", claim)


def _atom(code: int) -> Statement:
    return ("lying" if code % 2 else "telling-truth", code // 2)


def _role(knight: bool) -> str:
    return "knight" if knight else "knave"


def _claim(statement: Statement, names: Sequence[str]) -> str:
    kind, *parts = statement
    if kind in _CONNECTIVES:
        return _CONNECTIVES[kind][0].format(*(_claim(part, names) for part in parts))
    verb, (kind, person) = ("is not", parts[0]) if kind == "not" else ("is", statement)
    return f"{names[person]} {verb} a {_role(kind == 'telling-truth')}"


def _quiz(names: Sequence[str], statements: Sequence[Statement], rng: random.Random) -> str:
    sentences = []
    for who, statement in zip(names, statements, strict=True):
        said = _claim(statement, names)
        sentences.append(rng.choice(_SENTENCES).format(who=who, said=said, Said=said[0].upper() + said[1:]))
    people = f"{', '.join(names[:-1])}, and {names[-1]}"
    return " ".join([ISLAND, f"You meet {len(names)} inhabitants: {people}.", *sentences, QUESTION])


def messages(quiz: str) -> list[dict[str, str]]:
    """Return the chat that puts a quiz to a model: the published instruction as system text, the quiz as user turn."""
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": quiz}]


def chatml(quiz: str) -> str:
    """Return the published prompt as final text: ChatML, as Qwen's models read it, up to the opening `<think>`."""
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}\n<|im_end|>\n" for turn in messages(quiz))
    return f"{turns}<|im_start|>assistant\n<think>"


def worked_solution(puzzle: Puzzle, rng: random.Random, *, solution_first: float = 0.5) -> str:
    """Write what an assistant who solves the puzzle says after a prefilled `<think>`. The answer is always right.

    The assistant tries assignments in random order and checks statements until one contradicts its speaker's role:
    " Try Emma knave, James knight: Emma false ok, James false no." It answers with the first assignment that fits.

    With the probability `solution_first` the first trial is the solution by choice. Otherwise 0 to 7 wrong trials come
    before it.
    """
    trials = [puzzle.solution]
    if rng.random() >= solution_first:
        wrong = [knights for knights in _assignments(len(puzzle.names)) if knights != puzzle.solution]
        trials[:0] = rng.sample(wrong, rng.randint(0, min(len(wrong), _MAX_WRONG_TRIALS)))
    text = ""
    for knights in trials:
        checks = []
        for name, statement, knight in zip(puzzle.names, puzzle.statements, knights, strict=True):
            holds = is_true(statement, knights)
            checks.append(f"{name} {'true' if holds else 'false'} {'ok' if holds == knight else 'no'}")
            if holds != knight:
                break
        roles = [f"{name} {_role(knight)}" for name, knight in zip(puzzle.names, knights, strict=True)]
        text += f" Try {', '.join(roles)}: {', '.join(checks)}."
    return f"{text}</think><answer>{puzzle.solution_text}</answer>"


def hasty_answer(puzzle: Puzzle, rng: random.Random) -> str:
    """Write what an assistant who does not think says after a prefilled `<think>`: no trial, and random roles.

    The answer is well-formed, and right by chance, once in 2^N times for N people.
    """
    roles = tuple(rng.random() < 0.5 for _ in puzzle.names)
    return f"</think><answer>{replace(puzzle, solution=roles).solution_text}</answer>"
