"""Hold what the agreement of gradients says of each method before training against what training then showed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import NamedTuple

from study import runs
from study.comparison import TITLES, Row, accuracy, differences, mean_reward, rows_of
from study.stored import load_agreements
from study.tables import Table, cell, difference, joined

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


def files(results: dict[str, dict], agreement: Path) -> dict[str, Table]:
    """Return the tables of cells, of methods, and of how the two go together, by the names of their CSV files.

    Args:
        results: of the runs of the family, by name.
        agreement: the file of what `study.warm_start_agreement` found.
    """
    found = {c: {by: load_agreements(c, by, agreement) for by in DIVISIONS} for c in runs.CONDITIONS}
    cells = {
        c: joined("tokens by", {by: _cells(list(of_seeds.values())) for by, of_seeds in of_divisions.items()})
        for c, of_divisions in found.items()
    }
    methods = {c: _methods(c, results, of_divisions) for c, of_divisions in found.items()}
    return {
        "agreement_cells.csv": joined("condition", cells),
        "agreement_methods.csv": joined("condition", {c: table for c, (table, _) in methods.items()}),
        "agreement_correlations.csv": joined("condition", {c: together for c, (_, together) in methods.items()}),
    }


def _cells(found: Sequence[dict]) -> Table:
    lines = [["cell", "seeds", "share of tokens", "share of the gradient", "cosine with the other half", "found"]]
    for number, name in enumerate(c["name"] for c in found[0]["cells"]) if found else ():
        of_seeds = [of_seed["cells"][number] for of_seed in found]
        tokens = [c["tokens"] / sum(o["tokens"] for o in s["cells"]) for c, s in zip(of_seeds, found, strict=True)]
        known = [c for c in of_seeds if "cosine" in c]
        lines.append(
            [name, str(len(found)), cell(tokens), cell([c["share"] for c in known])]
            + [cell([c["cosine"] for c in known], 2), _counted(c["found"] for c in of_seeds)]
        )
    return lines


def _methods(condition: str, results: dict[str, dict], found: Mapping[str, _Found]) -> tuple[Table, Table]:
    """Return a line for each method, and the rank correlations over them."""
    (baseline,) = rows_of([f"{condition}-grpo"], results)
    head = ["method"]
    for by in DIVISIONS:
        head += [f"by {by}: lowers", f"by {by}: share in cells that agree"]
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
    head = ["tokens by", "methods", "seeds", "with accuracy", "with reward over training", "cosine of the halves"]
    together = [head]
    for by, of_methods in shown.items():
        wholes = [of_seed["whole"]["cosine"] for of_seed in found[by].values()]
        together.append([by, *_together(of_methods), cell(wholes, 2)])
    return lines, together


def _shown(moves: Mapping[int, float], row: Row, baseline: Row) -> list[Shown]:
    """Return a method's figures on the seeds for which there are all of them, or nothing where there is none."""
    seeds = moves.keys() & row.results.keys() & baseline.results.keys()
    own = row._replace(results={seed: row.results[seed] for seed in seeds})
    accuracies, rewards = (differences(own, baseline, measure) for measure in (accuracy, mean_reward))
    if not (accuracies and rewards):
        return []
    move = fmean(moves[seed] for seed in seeds)
    return [Shown(move, accuracies.difference.mean, rewards.difference.mean, frozenset(seeds))]


def _together(shown: Sequence[Shown]) -> list[str]:
    """Return how many methods and which seeds there are, and how their moves rank with accuracy and with reward."""
    moves = [of_method.move for of_method in shown]
    seeds = ", ".join(map(str, sorted(frozenset().union(*(of_method.seeds for of_method in shown)))))
    accuracies = rank_correlation(moves, [of_method.accuracy for of_method in shown])
    rewards = rank_correlation(moves, [of_method.reward for of_method in shown])
    return [str(len(shown)), seeds or "none", accuracies, rewards]


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
