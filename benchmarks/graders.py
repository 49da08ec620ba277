"""Measure gradings per second: K&K's on one core, and math's in turn with math-verify called directly.

python benchmarks/graders.py [--labels SET.parquet] [--json results.json]

The math answers are made from the labels of a published set, spelled another way or changed to a wrong answer. Without
--labels, the labels are numbers, fractions, roots and intervals made here. Nothing is graded twice, so no cache helps.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.lab.data import knights_knaves

CHARACTERS = 4000  # of a K&K response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", metavar="PARQUET", help="verl-style set with reward_model.ground_truth")
    parser.add_argument("--count", type=int, default=600, help="math answers per round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the medians are reported")
    parser.add_argument("--json", metavar="PATH", help="file for the results")
    args = parser.parse_args()
    kk = statistics.median(kk_rate() for _ in range(args.repeats))
    print(f"K&K: {kk:,.0f} gradings/s of {CHARACTERS:,}-character responses, one thread")
    answers = math_answers(args.labels, args.count * args.repeats)
    math_reward.grade("\\boxed{1}", "2")  # starts the workers
    ours, direct = [], []
    for i in range(args.repeats):
        part = answers[i * args.count : (i + 1) * args.count]
        ours.append(len(part) / seconds(grade_ours, part))
        direct.append(len(part) / seconds(grade_directly, part))
    ratio = statistics.median(o / d for o, d in zip(ours, direct, strict=True))
    results = dict(
        kk_per_s=kk, math_per_s=statistics.median(ours), math_verify_per_s=statistics.median(direct), math_ratio=ratio
    )
    print(
        f"math: {results['math_per_s']:,.0f} gradings/s in {math_reward.WORKERS} processes, math-verify called "
        f"directly {results['math_verify_per_s']:,.0f}: ratio {ratio:.2f}"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def kk_rate() -> float:
    """Return gradings per second of right answers to new puzzles, measured for a second."""
    rng = random.Random(0)
    puzzles = knights_knaves.generate(5, rng, held_out=False)
    samples = []
    for puzzle, _ in zip(puzzles, range(200), strict=False):
        answer = f"<answer>{puzzle.solution_text}</answer>"
        words = "Suppose that Zoey is a knight, then her claim is true and Oliver is a knave. "
        thought = (words * (CHARACTERS // len(words) + 1))[: CHARACTERS - len(answer) - len("<think></think>")]
        samples.append((f"<think>{thought}</think>{answer}", puzzle.solution_text))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 1:
        for response, label in samples:
            assert kk_reward.grade(response, label).score == 1
        count += len(samples)
    return count / (time.perf_counter() - start)


def math_answers(labels: str | None, count: int) -> list[tuple[str, str]]:
    """Make pairs of response and label, all different."""
    rng = random.Random(0)
    if labels:
        import pandas as pd

        pool = [row["ground_truth"] for row in pd.read_parquet(labels)["reward_model"]]
        pool = [str(label[0] if hasattr(label, "tolist") else label).strip() for label in pool]
    else:
        pool = []
    made: dict[tuple[str, str], None] = {}  # a set that keeps its order
    while len(made) < count:
        a, b, c = (rng.randrange(2, 10**4) for _ in range(3))
        label = rng.choice(
            pool or [str(a), f"\\frac{{{a}}}{{{b}}}", f"{a}\\sqrt{{{b}}}", f"\\left({a}, {b}\\right]", f"{a}x^2+{b}y"]
        )
        answer = rng.choice([f" {label} + 0", f"{label} + {c}", f"{c}"]) if "," not in label else f"{label} , {c}"
        made[f"It is {c} of {a}.\n\\boxed{{{answer}}}", label] = None
    return list(made)


def grade_ours(answers: Sequence[tuple[str, str]]) -> None:
    """Grade with the package's math reward, as OpenRLHF calls it: from threads."""
    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        list(threads.map(lambda pair: math_reward.grade(*pair), answers))


def grade_directly(answers: Sequence[tuple[str, str]]) -> None:
    """Grade with math-verify alone, in this thread."""
    from math_verify import parse, verify

    for response, label in answers:
        verify(parse(f"${label}$"), parse(response))


def seconds(function: Callable[[Sequence[tuple[str, str]]], None], answers: Sequence[tuple[str, str]]) -> float:
    """Return how long the function takes for the answers."""
    start = time.perf_counter()
    function(answers)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
