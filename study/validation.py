"""Hold what the agreement of gradients says of each method before training against what training then showed."""

from collections import Counter
from collections.abc import Sequence
from statistics import StatisticsError, correlation, fmean

from arlopti_openrlhf.scoring.tables import markdown_table
from study.comparison import TITLES, accuracy, differences, mean_reward, rows_of
from study.tables import cell

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
Agreements = dict[int, dict]  # by seed


def tables(condition: str, results: dict[str, dict], agreements: Agreements) -> str:
    """Return a condition's part of the report: its cells, its methods, and how the two go together."""
    if not agreements:
        return "No warm start was asked yet (`python -m study.agreement`).\n"
    wholes = [found["whole"]["cosine"] for found in agreements.values()]
    between = f"Cosine between the gradients of two halves of the puzzles: {cell(wholes, 2)}.\n"
    return "\n".join([between, _cells(agreements), _methods(condition, results, agreements)])


def _cells(agreements: Agreements) -> str:
    lines = [["cell", "seeds", "tokens", "share of the gradient", "cosine with the other half", "found"]]
    for number, name in enumerate(c["name"] for c in next(iter(agreements.values()))["cells"]):
        found = [of_seed["cells"][number] for of_seed in agreements.values()]
        tokens = [
            c["tokens"] / sum(other["tokens"] for other in s["cells"])
            for c, s in zip(found, agreements.values(), strict=True)
        ]
        known = [c for c in found if "cosine" in c]
        lines.append(
            [
                name,
                str(len(found)),
                cell(tokens),
                cell([c["share"] for c in known]),
                cell([c["cosine"] for c in known], 2),
            ]
            + [_counted(c["found"] for c in found)]
        )
    return markdown_table(lines)


def _methods(condition: str, results: dict[str, dict], agreements: Agreements) -> str:
    (baseline,) = rows_of([f"{condition}-grpo"], results)
    lines = [["method", "seeds", "lowers", "share in cells that agree", "pairs", "accuracy", "reward over training"]]
    predicted, shown, sooner = [], [], []
    for variant, method in METHODS.items():
        (row,) = rows_of([f"{condition}-{variant}"], results)
        judged = [found["methods"][method] for found in agreements.values() if method in found["methods"]]
        moves = [m["agreeing_after"] - m["agreeing_before"] for m in judged]
        test, reward = differences(row, baseline, accuracy), differences(row, baseline, mean_reward)
        line = [TITLES[row.name], str(len(judged)), _counted(m["lowers"] for m in judged)]
        line.append(f"{fmean(moves):+.3f}" if moves else "")
        line.append(str(test.difference.n) if test else "0")
        lines.append(line + [f"{found.difference.mean:+.3f}" if found else "" for found in (test, reward)])
        if moves and test and reward:
            predicted.append(fmean(moves))
            shown.append(test.difference.mean)
            sooner.append(reward.difference.mean)
    said = (
        f"Rank correlation, over {len(predicted)} methods, of the share in cells that agree with accuracy: "
        f"{rank_correlation(predicted, shown)}, with reward over training: {rank_correlation(predicted, sooner)}.\n"
    )
    return markdown_table(lines) + "\n" + said


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


def _counted(words) -> str:
    """Return how often each word occurs, as in "noise 2, both 1"."""
    counts = Counter(words)
    return ", ".join(f"{word} {count}" if len(counts) > 1 else word for word, count in counts.most_common())
