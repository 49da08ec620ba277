"""Make, check, describe and write the rows of training and evaluation data."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from arlopti_openrlhf import terminal
from arlopti_openrlhf.lab.data import knights_knaves, published
from arlopti_openrlhf.lab.data.structures import canonical_form
from arlopti_openrlhf.lab.scoring.inputs import Row, encode

PROMPT_FORMATS = ("messages", "text")


def generate_rows(
    people: Sequence[int],
    count: int,
    *,
    held_out: bool,
    seed: int,
    prompt_format: str = "messages",
    names: Sequence[str] = knights_knaves.NAMES,
    report: Callable[[str], None] | None = None,
) -> list[Row]:
    """Make `count` rows of distinct new puzzles for each number of people, with the sources in turn.

    Rows with `held_out` have other structures than those without, at every seed (`knights_knaves.is_held_out`). A
    larger count continues a smaller one. With `report` a bar shows the progress on a terminal, and `report` gets a
    line for each number of people of whom there are fewer structures than puzzles.

    Raises:
        ValueError: a number of people outside 2 to 8.
    """
    make_prompt = knights_knaves.messages if prompt_format == "messages" else knights_knaves.chatml
    sources = []
    for num_people in people:
        rng = random.Random(f"{seed}/{num_people}/{held_out}")
        # Two people have only 249 structures, so a puzzle counts as new by its wording.
        chosen: dict[str, Row] = {}
        structures = set()
        source = knights_knaves.datasource(num_people)
        bar = tqdm(total=count, desc=source, leave=False, disable=None if report else True)
        for puzzle in knights_knaves.generate(num_people, rng, held_out=held_out, names=names):
            if len(chosen) == count:
                break
            if report:
                structures.add(canonical_form(puzzle.statements))
            prompt = make_prompt(puzzle.quiz)
            chosen[puzzle.quiz] = {
                "prompt": prompt,
                "label": puzzle.solution_text,
                "datasource": puzzle.datasource,
            }
            bar.update(len(chosen) - bar.n)
        bar.close()
        if report and len(structures) < count:
            report(f"{source}: {count} puzzles of {len(structures)} structures, with other names or in other words")
        sources.append(chosen.values())
    return [row for rows in zip(*sources, strict=True) for row in rows]


def check(
    reads: Iterable[published.Read],
    *,
    excluded: Mapping[str, str],
    num_tokens: Callable[[Row], int] | None,
    max_tokens: int | None,
) -> tuple[list[Row], list[published.Read]]:
    """Separate the rows that training can use from the others, which say why.

    `excluded` is {`published.prompt_key` of a prompt that must not occur, such as a test set's: where it comes from}.
    Rows whose prompts have more tokens than `max_tokens` are dropped.
    """

    def without_bad_prompt(read: published.Read) -> published.Read:
        if read.row is None:
            return read
        key = published.prompt_key(read.row["prompt"])
        if not key:
            return published.Read(read.origin, None, "unreadable", "the prompt is empty")
        if key in excluded:
            return published.Read(read.origin, None, "excluded", f"the prompt occurs as {excluded[key]}")
        if max_tokens is not None and num_tokens is not None and (length := num_tokens(read.row)) > max_tokens:
            return published.Read(read.origin, None, "too long", f"{length} tokens, more than {max_tokens}")
        return read

    checked = [without_bad_prompt(read) for read in reads]
    return [read.row for read in checked if read.row is not None], [read for read in checked if read.row is None]


def token_counter(tokenizer: str) -> Callable[[Row], int]:
    """Return a function that counts the tokens of a row's prompt as OpenRLHF sends it to vLLM."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda row: len(encode(loaded, [row["prompt"]])[1][0])


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows as JSON lines, or as parquet where the path ends in ".parquet". The same rows give the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".parquet":
            import pandas as pd

            pd.DataFrame(rows).to_parquet(path, index=False)
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:  # that of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    counts = Counter(row["datasource"] for row in rows)
    sources = ", ".join(f"{source} {count}" for source, count in sorted(counts.items()))
    print(f"{path}: {terminal.one_line(sources) or 'no rows'}")
