"""Sums for a pretrained model: every problem is in one of two splits, and the math reward agrees with the labels."""

import re

from arlopti_openrlhf.grading import math_reward
from arlopti_openrlhf.lab.data.sums import generate_rows, is_held_out, problems


def test_each_problem_is_there_once_and_has_the_answer_of_python():
    texts = [problem for problem, _ in problems()]
    assert len(set(texts)) == len(texts) == 144 + 78 + 144
    for problem, answer in problems():
        assert re.fullmatch(r"\d+ [-+*] \d+", problem) and eval(problem) == answer >= 0


def test_no_seed_puts_a_held_out_problem_into_training():
    held_out = {problem for problem, _ in problems() if is_held_out(problem)}
    for seed in range(3):
        train, test = (
            {row["prompt"][0]["content"] for row in generate_rows(300, held_out=split, seed=seed)}
            for split in (False, True)
        )
        assert not train & test
        assert test == {f"Calculate {problem}." for problem in held_out} and len(train) == 366 - len(held_out)


def test_what_is_held_out_has_no_twin_in_training():
    for problem, _ in problems():
        a, operation, b = problem.split()
        assert operation == "-" or is_held_out(problem) == is_held_out(f"{b} {operation} {a}")


def test_the_same_seed_gives_the_same_rows_and_more_rows_continue_fewer():
    rows = generate_rows(500, held_out=False, seed=1)
    assert rows[:10] == generate_rows(10, held_out=False, seed=1) != generate_rows(10, held_out=False, seed=2)


def test_the_math_reward_takes_the_label_and_an_equation_that_ends_in_it():
    rows = generate_rows(12, held_out=True, seed=0)
    right = [f"{row['prompt'][0]['content'][10:-1]} = {row['label']}" for row in rows]
    wrong = [f"{text}1" for text in right]
    for texts, score in ((right, 1.0), (wrong, 0.0)):
        graded = math_reward.reward_func(texts, [""] * len(rows), [row["label"] for row in rows])
        assert graded["scores"].tolist() == [score] * len(rows)
