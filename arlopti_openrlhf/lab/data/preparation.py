"""Make, check, describe and write the rows of training and evaluation data."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from arlopti_openrlhf.grading import math_reward
from arlopti_openrlhf.lab.data import knights_knaves, published
from arlopti_openrlhf.lab.data.published import Row

PROMPT_FORMATS = ("messages", "text")


def generate_rows(
    people: Sequence[int],
    count: int,
    *,
    held_out: bool,
    seed: int,
    prompt_format: str = "messages",
    names: Sequence[str] = knights_knaves.NAMES,
    solutions: bool = False,
) -> list[Row]:
    """Make `count` rows of distinct new puzzles for each number of people, with the sources in turn.

    Rows with `held_out` have other structures than those without, at every seed (`knights_knaves.is_held_out`). A
    larger count continues a smaller one. With `solutions` each row also has a `response`, which is a worked solution
    to fine-tune a model on.

    Raises:
        ValueError: a number of people outside 2 to 8.
    """
    sources = []
    for num_people in people:
        rng = random.Random(f"{seed}/{num_people}/{held_out}")
        puzzles = knights_knaves.generate(num_people, rng, held_out=held_out, names=names)
        sources.append(_distinct_rows(puzzles, count, prompt_format, solutions))
    return [row for rows in zip(*sources, strict=True) for row in rows]


def _distinct_rows(
    puzzles: Iterator[knights_knaves.Puzzle], count: int, prompt_format: str, solutions: bool
) -> list[Row]:
    # Two people have only 249 structures, so a puzzle counts as new by its wording.
    chosen: dict[str, Row] = {}
    make_prompt = knights_knaves.messages if prompt_format == "messages" else knights_knaves.chatml
    while len(chosen) < count:
        for puzzle in islice(puzzles, count - len(chosen)):
            prompt = make_prompt(puzzle.quiz)
            row = {"prompt": prompt, "label": puzzle.solution_text, "datasource": puzzle.datasource}
            if solutions:
                row["response"] = knights_knaves.worked_solution(puzzle, random.Random(puzzle.quiz))
            chosen[puzzle.quiz] = row
    return list(chosen.values())


def convert_rows(path: str | Path, *, prompt_format: str = "messages") -> list[Row]:
    """Return the rows of a published file (`published.read_file`).

    Raises:
        ValueError: a row is bad; the message names the file and the row.
    """
    rows = []
    for read in published.read_file(path, prompt_format):
        if read.row is None:
            raise ValueError(f"{read.origin}: {read.reason}")
        rows.append(read.row)
    return rows


class Dropped(NamedTuple):
    """Names a row that is not written, and says why."""

    origin: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}: {self.detail}"


def check(
    reads: Iterable[published.Read],
    *,
    excluded: Mapping[str, str] = MappingProxyType({}),
    num_tokens: Callable[[Row], int] | None = None,
    max_tokens: int | None = None,
) -> tuple[list[Row], list[Dropped]]:
    """Separate the rows that training can use from the others.

    Args:
        reads: what was read.
        excluded: {`published.prompt_key` of a prompt that must not occur: where it comes from}, such as a test set's.
        num_tokens: counts the tokens of a row's prompt.
        max_tokens: rows with longer prompts are dropped.
    """
    candidates: list[published.Read] = []
    rows: list[Row] = []
    dropped: list[Dropped] = []
    for read in reads:
        if read.row is None:
            dropped.append(Dropped(read.origin, "unreadable", read.reason))
            continue
        key = published.prompt_key(read.row["prompt"])
        if not key:
            dropped.append(Dropped(read.origin, "unreadable", "the prompt is empty"))
        elif key in excluded:
            dropped.append(Dropped(read.origin, "excluded", f"the prompt occurs as {excluded[key]}"))
        elif max_tokens is not None and num_tokens is not None and num_tokens(read.row) > max_tokens:
            dropped.append(Dropped(read.origin, "too long", f"{num_tokens(read.row)} tokens, more than {max_tokens}"))
        else:
            candidates.append(read)
            rows.append(read.row)
    # Math labels have to be read by the grader, whose workers take several at a time. K&K's were read on the way in.
    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        readable = list(threads.map(_is_readable, rows))
    for read, row, is_readable in zip(candidates, rows, readable, strict=True):
        if not is_readable:
            dropped.append(Dropped(read.origin, "label", f"the grader cannot read {row['label'][:200]!r}"))
    return [row for row, is_readable in zip(rows, readable, strict=True) if is_readable], dropped


def _is_readable(row: Row) -> bool:
    return row["datasource"].startswith("kk_") or math_reward.is_readable(row["label"])


def describe(rows: Sequence[Row], num_tokens: Callable[[Row], int] | None) -> str:
    """Return the most frequent labels and the lengths of the prompts, in a few lines."""
    if not rows:
        return "  no rows"
    labels = Counter(row["label"] for row in rows)
    common = ", ".join(f"{' '.join(label.split())[:30]!r} {n}" for label, n in labels.most_common(5))
    lengths = sorted(num_tokens(row) if num_tokens else len(_text(row["prompt"])) for row in rows)
    quantiles = [lengths[round(q * (len(lengths) - 1))] for q in (0, 0.5, 0.95, 1)]
    repeated = len(rows) - len({published.prompt_key(row["prompt"]) for row in rows})
    return (
        f"  labels: {len(labels)} different; most frequent {common}\n"
        f"  prompts: {'tokens' if num_tokens else 'characters'} min {quantiles[0]}, median {quantiles[1]}, "
        f"95% {quantiles[2]}, max {quantiles[3]}" + (f"; {repeated} occur more than once" if repeated else "")
    )


def _text(prompt: str | list[dict]) -> str:
    return prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)


def token_counter(tokenizer: str) -> Callable[[Row], int]:
    """Return a function that counts the tokens of a row's prompt as OpenRLHF sends it to vLLM."""
    from transformers import AutoTokenizer

    tokenize = AutoTokenizer.from_pretrained(tokenizer)

    def count(row: Row) -> int:
        text = row["prompt"]
        if not isinstance(text, str):
            text = tokenize.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        return len(tokenize(text, add_special_tokens=False)["input_ids"])

    return count


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows as JSON lines, or as parquet where the path ends in ".parquet". The same rows give the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pandas as pd

        pd.DataFrame(rows).to_parquet(path, index=False)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    counts = Counter(row["datasource"] for row in rows)
    print(f"{path}: {', '.join(f'{source} {count}' for source, count in sorted(counts.items())) or 'no rows'}")
