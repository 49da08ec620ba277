"""Hold what the agreement of gradients says of each method before training against what training then showed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import NamedTuple

from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study.comparison import TITLES, Row, accuracy, differences, mean_reward, rows_of
from study.stored import load_agreements
from study.tables import cell, difference

DIVISIONS = ("probability", "entropy")
# {variant: the method's name in the agreement}. Lopti's two passes share the tokens, so it moves no share.
METHODS = {
    "ar": "ar",
    "direction": "ar alpha=-0.2 (Direction)",
    "eighty-twenty": "eighty_twenty",
    "stapo": "stapo",
    "a3po": "a3po",
    "stare": "stare",
    "steer": "steer",
}
_Found = Mapping[int, dict]  # by seed


class Shown(NamedTuple):
    """Holds what was said of a method, and its mean differences to GRPO, on the seeds of which it was said."""

    move: float  # of the share of the gradient in cells that agree
    accuracy: float
    reward: float
    seeds: frozenset[int]


def tables(condition: str, results: dict[str, dict], agreement: Path) -> str:
    """Return a condition's part of the report: its cells, its methods, and how the two go together."""
    found = {by: load_agreements(condition, by, agreement) for by in DIVISIONS}
    parts = [f"### {condition}\n"]
    if not any(found.values()):
        return parts[0] + "\nNo warm start was asked yet (`python -m study.warm_start_agreement`).\n"
    wholes = [of_seed["whole"]["cosine"] for of_seed in next(filter(None, found.values())).values()]
    parts.append(f"Cosine between the gradients of two halves of the puzzles: {cell(wholes, 2)}.\n")
    parts += [_cells(by, list(of_seeds.values())) for by, of_seeds in found.items() if of_seeds]
    return "\n".join([*parts, _methods(condition, results, found)])


def _cells(by: str, found: Sequence[dict]) -> str:
    lines = [[f"tokens by {by}", "seeds", "tokens", "share of the gradient", "cosine with the other half", "found"]]
    for number, name in enumerate(c["name"] for c in found[0]["cells"]):
        of_seeds = [of_seed["cells"][number] for of_seed in found]
        tokens = [c["tokens"] / sum(o["tokens"] for o in s["cells"]) for c, s in zip(of_seeds, found, strict=True)]
        known = [c for c in of_seeds if "cosine" in c]
        lines.append(
            [name, str(len(found)), cell(tokens), cell([c["share"] for c in known])]
            + [cell([c["cosine"] for c in known], 2), _counted(c["found"] for c in of_seeds)]
        )
    return markdown_table(lines)


def _methods(condition: str, results: dict[str, dict], found: Mapping[str, _Found]) -> str:
    (baseline,) = rows_of([f"{condition}-grpo"], results)
    head = ["method"]
    for by in DIVISIONS:
        head += [f"by {by}: lowers", "share in cells that agree"]
    lines = [[*head, "accuracy minus GRPO's", "reward over training"]]
    shown: dict[str, list[Shown]] = {by: [] for by in DIVISIONS}
    for variant, method in METHODS.items():
        (row,) = rows_of([f"{condition}-{variant}"], results)
        line = [TITLES[row.name]]
        for by, of_seeds in found.items():
            judged = {seed: s["methods"][method] for seed, s in of_seeds.items() if method in s["methods"]}
            moves = {seed: m["agreeing_after"] - m["agreeing_before"] for seed, m in judged.items()}
            line += [_counted(m["lowers"] for m in judged.values()), f"{fmean(moves.values()):+.3f}" if moves else ""]
            shown[by] += _shown(moves, row, baseline)
        accuracies, rewards = (differences(row, baseline, measure) for measure in (accuracy, mean_reward))
        lines.append([*line, difference(accuracies), difference(rewards)])
    return "\n".join([markdown_table(lines), *(_together(by, of_methods) for by, of_methods in shown.items())])


def _shown(moves: Mapping[int, float], row: Row, baseline: Row) -> list[Shown]:
    """Return a method's figures on the seeds for which there are all of them, or nothing where there is none."""
    seeds = moves.keys() & row.results.keys() & baseline.results.keys()
    own = row._replace(results={seed: row.results[seed] for seed in seeds})
    accuracies, rewards = (differences(own, baseline, measure) for measure in (accuracy, mean_reward))
    if not (accuracies and rewards):
        return []
    move = fmean(moves[seed] for seed in seeds)
    return [Shown(move, accuracies.difference.mean, rewards.difference.mean, frozenset(seeds))]


def _together(by: str, shown: Sequence[Shown]) -> str:
    moves = [of_method.move for of_method in shown]
    seeds = ", ".join(map(str, sorted(frozenset().union(*(of_method.seeds for of_method in shown)))))
    accuracies = rank_correlation(moves, [of_method.accuracy for of_method in shown])
    rewards = rank_correlation(moves, [of_method.reward for of_method in shown])
    return (
        f"Rank correlation over {len(shown)} methods, tokens by {by}, seeds {seeds or 'none'}: of the share in cells "
        f"that agree with accuracy {accuracies}, with reward over training {rewards}.\n"
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> str:
    """Return Spearman's ρ, and p: how many of all orders of the values have one as far from 0.

    It is "not known" where there are fewer than three values, or all are equal. Up to eight values take no second.
    """
    try:
        if len(first) < 3:
            raise StatisticsError
        own, other = _ranks(first), _ranks(second)
        found = correlation(own, other)
        orders = [abs(correlation(own, order)) >= abs(found) - 1e-9 for order in permutations(other)]
        return f"{found:+.2f} (p {fmean(orders):.2f})"
    except StatisticsError:
        return "not known"


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal ones share the mean of theirs."""
    return [1 + sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def _counted(words: Iterable[str]) -> str:
    """Return how often each word occurs, as in "noise 2, both 1"."""
    counts = Counter(words)
    return ", ".join(f"{word} {count}" if len(counts) > 1 else word for word, count in counts.most_common())
