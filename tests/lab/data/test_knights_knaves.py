import hashlib
import itertools
import random

import pytest
from arlopti_testing.published_wording import INTRODUCTION, PUBLISHED_FORMS, read_puzzle

from arlopti_openrlhf.grading.kk_reward import grade
from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.data.knights_knaves import (
    INSTRUCTION,
    NAMES,
    chatml,
    generate,
    hasty_answer,
    is_held_out,
    is_true,
    messages,
    solutions,
    worked_solution,
)

# A puzzle of the published data set, word for word.
PUBLISHED_STATEMENTS = (
    ("<=>", ("telling-truth", 2), ("telling-truth", 0)),
    ("or", ("telling-truth", 1), ("telling-truth", 2)),
    ("<=>", ("lying", 0), ("lying", 1)),
)
PUBLISHED_SENTENCES = (
    'Michael was heard saying, "Ethan is a knight if and only if Michael is a knight".',
    '"Zoey is a knight or Ethan is a knight," Zoey mentioned.',
    'Ethan asserted: "Michael is a knave if and only if Zoey is a knave".',
)


def some(num_people, count, seed=0, **options):
    return list(itertools.islice(generate(num_people, random.Random(seed), **options), count))


def fits(statements, knights):
    """Tell whether exactly the knights' statements are true, by Python's own operators."""
    python = {"and": "and", "or": "or", "->": "<=", "<=>": "=="}

    def expression(statement):
        kind, first = statement[:2]
        if kind in ("telling-truth", "lying"):
            return f"(knights[{first}] is {kind == 'telling-truth'})"
        if kind == "not":
            return f"(not {expression(first)})"
        return f"({expression(first)} {python[kind]} {expression(statement[2])})"

    return all(
        eval(expression(s), {"knights": knights}) == knight for s, knight in zip(statements, knights, strict=True)
    )


@pytest.mark.parametrize("num_people, count", [(2, 200), (3, 200), (4, 50), (5, 30), (6, 20), (7, 10), (8, 5)])
def test_exactly_one_solution(num_people, count):
    for puzzle in some(num_people, count):
        every = itertools.product([True, False], repeat=num_people)
        assert [knights for knights in every if fits(puzzle.statements, knights)] == [puzzle.solution]


@pytest.mark.parametrize("num_people", [2, 3, 8])
def test_wording_reads_back(num_people):
    forms = set()
    for puzzle in some(num_people, 300 // num_people):
        names, statements, used = read_puzzle(puzzle.quiz)
        assert (tuple(names), statements) == (puzzle.names, puzzle.statements)
        forms |= used
    assert forms == PUBLISHED_FORMS


def test_published_puzzle():
    assert solutions(PUBLISHED_STATEMENTS, 3) == [(True, True, True)]
    introduction = INTRODUCTION.format(3, "Michael, Zoey, and Ethan")
    quiz = introduction + " ".join((*PUBLISHED_SENTENCES, "So who is a knight and who is a knave?"))
    names, statements, _ = read_puzzle(quiz)
    assert statements == PUBLISHED_STATEMENTS
    # The module's own wording differs in nothing but the choice of sentences.
    forms = itertools.product(knights_knaves._SENTENCES, repeat=3)
    assert any(knights_knaves._quiz(names, statements, Choices(form)) == quiz for form in forms)


class Choices:
    """Stands in for random.Random: choice() returns the given values in turn."""

    def __init__(self, values):
        self.values = iter(values)

    def choice(self, options):
        return next(self.values)


def test_every_kind_of_statement_occurs():
    kinds = {statement[0] for puzzle in some(3, 300) for statement in puzzle.statements}
    assert kinds == {"telling-truth", "lying", "not", "and", "or", "->", "<=>"}


def test_solutions_none_one_many():
    alike = ("telling-truth", 0), ("telling-truth", 0)  # "I am a knight", "so is she"
    assert sorted(solutions(alike, 2)) == [(False, False), (True, True)]
    assert solutions((("lying", 0), ("telling-truth", 0)), 2) == []
    assert solutions((("not", ("telling-truth", 1)), ("lying", 0)), 2) != []
    with pytest.raises(ValueError, match="1 statements for 2 people"):
        solutions((("lying", 1),), 2)


def test_unknown_statement_is_refused():
    with pytest.raises(ValueError, match="xor"):
        is_true(("xor", ("lying", 0), ("lying", 1)), (True, False))


@pytest.mark.parametrize(
    ("num_people", "names", "message"),
    [(1, NAMES, r"\[2, 8\], got 1"), (9, NAMES, r"\[2, 8\], got 9"), (3, NAMES[:2], "3 people need as many names")],
)
def test_people_that_no_puzzle_has(num_people, names, message):
    with pytest.raises(ValueError, match=message):
        next(generate(num_people, random.Random(0), names=names))


def test_names_are_distinct_words():
    assert len(set(NAMES)) == len(NAMES) >= 51 and all(name.isalpha() for name in NAMES)


def test_a_third_of_the_structures_is_held_out():
    share = sum(is_held_out(p.statements) for p in some(4, 2000)) / 2000
    assert 0.29 < share < 0.38  # 1/3, give or take four standard errors


def test_prompt_is_the_published_one():
    quiz = some(2, 1)[0].quiz
    assert messages(quiz) == [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": quiz}]
    assert chatml(quiz) == (
        f"<|im_start|>system\n{INSTRUCTION}\n<|im_end|>\n<|im_start|>user\n{quiz}\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


@pytest.mark.parametrize("num_people", range(2, 9))
def test_worked_solution_earns_the_full_reward(num_people):
    rng = random.Random(0)
    for puzzle in some(num_people, 20):
        text = worked_solution(puzzle, rng)
        assert grade(f"<think>{text}", puzzle.solution_text).reward == 3.0


def test_worked_solution_by_hand():
    statements = (("lying", 1), ("and", ("lying", 0), ("lying", 1)))
    (solution,) = solutions(statements, 2)
    assert solution == (True, False)
    puzzle = knights_knaves.Puzzle(("Emma", "James"), statements, solution, "")
    assert worked_solution(puzzle, random.Random(0), solution_first=1.0) == (
        " Try Emma knight, James knave: Emma true ok, James false ok."
        "</think><answer>(1) Emma is a knight\n(2) James is a knave</answer>"
    )
    # A trial ends at the first statement that contradicts its speaker's role; James' is never reached here.
    texts = {worked_solution(puzzle, random.Random(seed), solution_first=0.0) for seed in range(50)}
    assert any(" Try Emma knight, James knight: Emma false no. Try" in text for text in texts)


def test_a_seed_gives_the_solutions_and_answers_that_it_always_gave():
    """300 texts, and the chance that is left, by their hash."""
    rng = random.Random(0)
    texts = [f(puzzle, rng) for puzzle in some(3, 150) for f in (worked_solution, hasty_answer)]
    digest = hashlib.sha256(f"{texts}{rng.random()}".encode()).hexdigest()
    assert digest[:16] == "faf23833bbe46d27"


def test_share_of_solutions_first():
    puzzle = some(3, 1)[0]
    rng = random.Random(0)
    texts = [worked_solution(puzzle, rng, solution_first=0.5) for _ in range(2000)]
    # Besides the half that goes first, one in eight of the others finds the solution at once: 0.5 + 0.5 / 8.
    at_once = sum(text.count("Try") == 1 for text in texts) / 2000
    assert abs(at_once - 0.5625) < 0.05


@pytest.mark.parametrize("num_people", [2, 3])
def test_a_hasty_answer_is_well_formed_and_right_by_chance(num_people):
    rng = random.Random(0)
    puzzle = some(num_people, 1)[0]
    grades = [grade(f"<think>{hasty_answer(puzzle, rng)}", puzzle.solution_text) for _ in range(2000)]
    assert all(found.well_formed and found.answered for found in grades)
    assert abs(sum(found.score for found in grades) / 2000 - 0.5**num_people) < 0.04
