"""Hold what the agreement of gradients says of each method before training against what training then showed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import NamedTuple

from arlopti_openrlhf.scoring.tables import markdown_table
from study.comparison import TITLES, accuracy, differences, mean_reward, rows_of
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
_Found = Sequence[dict]  # one per seed


class Shown(NamedTuple):
    """Holds a method's mean differences to GRPO, in accuracy and in reward over training."""

    accuracy: float
    reward: float


def tables(condition: str, results: dict[str, dict], folder: Path) -> str:
    """Return a condition's part of the report: its cells, its methods, and how the two go together."""
    found = {by: list(load_agreements(condition, by, folder).values()) for by in DIVISIONS}
    parts = [f"### {condition}\n"]
    if not any(found.values()):
        return parts[0] + "\nNo warm start was asked yet (`python -m study.agreement`).\n"
    wholes = [of_seed["whole"]["cosine"] for of_seed in next(filter(None, found.values()))]
    parts.append(f"Cosine between the gradients of two halves of the puzzles: {cell(wholes, 2)}.\n")
    parts += [_cells(by, of_seeds) for by, of_seeds in found.items() if of_seeds]
    return "\n".join([*parts, _methods(condition, results, found)])


def _cells(by: str, found: _Found) -> str:
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
    moves: dict[str, dict[str, float]] = {by: {} for by in DIVISIONS}
    shown: dict[str, Shown] = {}
    for variant, method in METHODS.items():
        (row,) = rows_of([f"{condition}-{variant}"], results)
        line = [TITLES[row.name]]
        for by, of_seeds in found.items():
            judged = [of_seed["methods"][method] for of_seed in of_seeds if method in of_seed["methods"]]
            line.append(_counted(m["lowers"] for m in judged))
            if judged:
                moves[by][variant] = fmean(m["agreeing_after"] - m["agreeing_before"] for m in judged)
            line.append(f"{moves[by][variant]:+.3f}" if judged else "")
        test, reward = differences(row, baseline, accuracy), differences(row, baseline, mean_reward)
        if test and reward:
            shown[variant] = Shown(test.difference.mean, reward.difference.mean)
        lines.append([*line, difference(test), difference(reward)])
    return "\n".join([markdown_table(lines), *(_together(by, moves[by], shown) for by in DIVISIONS)])


def _together(by: str, moves: dict[str, float], shown: dict[str, Shown]) -> str:
    both = [variant for variant in moves if variant in shown]
    predicted = [moves[variant] for variant in both]
    return (
        f"Rank correlation over {len(both)} methods, tokens by {by}: of the share in cells that agree with accuracy "
        f"{rank_correlation(predicted, [shown[variant].accuracy for variant in both])}, with reward over training "
        f"{rank_correlation(predicted, [shown[variant].reward for variant in both])}.\n"
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> str:
    """Return Spearman's ρ; "not known" where there are fewer than three values, or all are equal."""
    try:
        if len(first) < 3:
            raise StatisticsError
        return f"{correlation(_ranks(first), _ranks(second)):+.2f}"
    except StatisticsError:
        return "not known"


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal ones share the mean of theirs."""
    return [1 + sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def _counted(words: Iterable[str]) -> str:
    """Return how often each word occurs, as in "noise 2, both 1"."""
    counts = Counter(words)
    return ", ".join(f"{word} {count}" if len(counts) > 1 else word for word, count in counts.most_common())
