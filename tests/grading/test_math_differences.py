"""The math reward against math-verify itself. Each difference is of a kind whose reason stands in a table."""

# ruff: noqa: E501, E731
import json
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arlopti_openrlhf.grading.math_reward import WORKERS, grade

HERE = Path(__file__).parent
# A folder of published sets, verl-style parquet files. None is in the repository.
PUBLISHED = os.environ.get("ARLOPTI_MATH_SETS")
# Answers that are made of a label.
WRITINGS = {
    "itself": "%s", "named": "x = %s", "with a unit": r"%s \text{ cm}", "in words": r"%s \text{ maybe}",
    "one more": "%s + 1", "negative": "-(%s)", "a guess more": "%s, 7919", "guesses": "7907 = 7919 = %s",
    "guesses before": "%s = 7907 = 7919", "thousands": r"%s \text{ thousand}",
}  # fmt: skip


def reasons() -> dict[tuple[str, str], tuple[int, str]]:
    """Return how many near misses ours takes otherwise than math-verify, and why, by kind and by who says right."""
    lines = (HERE / "math_differences.tsv").read_text("utf-8").splitlines()[1:]
    return {(kind, who): (int(count), reason) for kind, who, count, reason in (line.split("\t") for line in lines)}


def made_labels() -> list[str]:
    """Return labels of the public sets' shapes."""
    rng = random.Random(0)
    shapes = [
        "{a}", "-{a}", r"\frac{{{a}}}{{{b}}}", r"-\frac{{{a}}}{{{b}}}", "{a}/{b}", "{a}.{b}", r"{a}\sqrt{{{b}}}", r"{a}\pi",
        r"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}", "({a},{b})", r"\left( {a}, -{b}, {c} \right)", "[{a},{d})", r"(-\infty,{a}]",
        r"(-\infty,{a}) \cup ({d},\infty)", "{a}, {d}", r"\{{{a}, {d}\}}", r"{a} \pm \sqrt{{{b}}}", r"{a}^\circ", r"{a}\%",
        "{a}x + {b}", "x^2 - {a}x + {b}", "{a}n^2", "y = {a}x + {b}", "f(x) = {a}x", "{a} + {b}i", r"\text{{even}}", "{a}!",
        r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}", r"{a} \times 10^{{{b}}}", "{a}:{b}", r"\ln {a}", "e^{{{b}}}",
        r"\binom{{{a}}}{{{b}}}", r"{a}\text{{ cm}}", "{a} < x < {d}", r"\$ {a}", "2^{{{a}}}", r"\log_{{{b}}} {a}",
    ]  # fmt: skip
    numbers = lambda: {
        "a": (a := rng.randrange(11, 99)),
        "b": rng.randrange(2, 10),
        "c": rng.randrange(2, 10),
        "d": a + 7,
    }  # noqa: E731
    return [shape.format(**numbers()) for shape in shapes for _ in range(5)]


def published_labels() -> list[str]:
    import pandas as pd

    labels = []
    for file in sorted(Path(PUBLISHED or "").glob("*.parquet")):
        for row in pd.read_parquet(file)["reward_model"]:
            label = row["ground_truth"]
            labels.append(str(label[0] if hasattr(label, "tolist") else label).strip())
    return random.Random(0).sample(list(dict.fromkeys(labels)), 300)


def near_misses() -> list[tuple[str, str, str]]:
    rows = [line.split("\t") for line in (HERE / "near_misses.tsv").read_text("utf-8").splitlines()[1:]]
    return [(kind, label, answer) for kind, _, label, answer in rows]


def written(labels: list[str]) -> list[tuple[str, str, str]]:
    return [(kind, label, form % label.strip("$")) for label in labels for kind, form in WRITINGS.items()]


def differences(pairs: list[tuple[str, str, str]]) -> list[tuple[str, str, str, str]]:
    """Return the kind, who says right, the label and the answer of each pair that is graded differently."""
    asked = json.dumps([[label, answer] for _, label, answer in pairs])
    verdicts = HERE / "math_verify_verdicts.py"
    theirs = json.loads(
        subprocess.run([sys.executable, verdicts], input=asked, capture_output=True, text=True, check=True).stdout
    )
    with ThreadPoolExecutor(WORKERS) as threads:
        ours = list(threads.map(lambda pair: grade(f"\\boxed{{{pair[2]}}}", pair[1]).score == 1, pairs))
    return [
        (kind, "ours" if our else "math-verify", label, answer)
        for (kind, label, answer), our, their in zip(pairs, ours, theirs, strict=True)
        if our != their
    ]


def print_by_reason(counts: Counter) -> None:
    by_reason: Counter = Counter()
    for kind, count in counts.items():
        by_reason[reasons().get(kind, (0, f"no reason: {kind}"))[1]] += count
    print(*by_reason.most_common(), sep="\n")


@pytest.mark.long
@pytest.mark.usefixtures("patient")
def test_each_near_miss_that_math_verify_takes_otherwise_is_counted():
    found = Counter(row[:2] for row in differences(near_misses()))
    print_by_reason(found)
    assert found == Counter({kind: count for kind, (count, _) in reasons().items()})


@pytest.mark.long
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "labels",
    [
        made_labels,
        pytest.param(
            published_labels,
            marks=pytest.mark.skipif(not PUBLISHED, reason="ARLOPTI_MATH_SETS names no folder of published sets"),
        ),
    ],
)
def test_each_answer_that_math_verify_takes_otherwise_has_a_reason(labels):
    found = differences(written(labels()))
    print_by_reason(Counter(row[:2] for row in found))
    assert not [row for row in found if row[:2] not in reasons()]
