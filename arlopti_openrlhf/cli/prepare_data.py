"""Write training and evaluation data for OpenRLHF, each row checked: published sets converted, or new puzzles.

    python -m arlopti_openrlhf.cli.prepare_data --generate --people 2 3 --train 4000 --test 256 --seed 0 --out data
    python -m arlopti_openrlhf.cli.prepare_data --from 3ppl_train.parquet 4ppl_train.parquet --out train.jsonl
    python -m arlopti_openrlhf.cli.prepare_data --dataset deepscaler --exclude math500.jsonl --out train.jsonl

The first writes data/train.jsonl and data/test.jsonl, the others one file; one that ends in ".parquet" is parquet.
Each row has `prompt` (chat messages for --data.apply_chat_template, or final text), `label` (the solution text) and
`datasource` ("kk_3ppl", "math500"), under the names that OpenRLHF's --data.input_key, --data.label_key and
`datasource` expect. Rows that training could not use are left out, counted by reason, and listed in FILE.dropped.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from arlopti_openrlhf.cli.arguments import integer
from arlopti_openrlhf.data import knights_knaves, published
from arlopti_openrlhf.data.published import Row
from arlopti_openrlhf.grading import math_reward

PROMPT_FORMATS = ("messages", "text")


def generate_rows(
    people: Sequence[int],
    count: int,
    *,
    held_out: bool,
    seed: int,
    prompt_format: str = "messages",
    names: Sequence[str] = knights_knaves.NAMES,
) -> list[Row]:
    """`count` rows of distinct new puzzles for each number of people, sources alternating.

    Rows with `held_out` are of other statement structures than those without, at every seed. A larger count continues
    a smaller one. ValueError on a number of people outside 2 to 8.
    """
    sources = []
    for num_people in people:
        rng = random.Random(f"{seed}/{num_people}/{held_out}")
        puzzles = knights_knaves.generate(num_people, rng, held_out=held_out, names=names)
        sources.append(_distinct_rows(puzzles, count, prompt_format))
    return [row for rows in zip(*sources, strict=True) for row in rows]


def _distinct_rows(puzzles, count: int, prompt_format: str) -> list[Row]:
    # Two people have only some hundred structures, so a puzzle counts as new by its wording.
    chosen: dict[str, Row] = {}
    while len(chosen) < count:
        for puzzle in islice(puzzles, count - len(chosen)):
            prompt = (
                knights_knaves.messages(puzzle.quiz)
                if prompt_format == "messages"
                else knights_knaves.chatml(puzzle.quiz)
            )
            chosen[puzzle.quiz] = {"prompt": prompt, "label": puzzle.solution_text, "datasource": puzzle.datasource}
    return list(chosen.values())


def convert_rows(path: str | Path, *, prompt_format: str = "messages") -> list[Row]:
    """The rows of a published file (`published.read_file`). ValueError, naming file and row, at the first bad one."""
    rows = []
    for read in published.read_file(path, prompt_format):
        if read.row is None:
            raise ValueError(f"{read.origin}: {read.reason}")
        rows.append(read.row)
    return rows


class Dropped(NamedTuple):
    """A row that is not written, and why."""

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
    """The rows that training can use, and the others.

    Args:
        reads: what was read.
        excluded: `published.prompt_key` of prompts that must not occur, such as a test set's -> where it comes from.
        num_tokens: the length of a row's prompt.
        max_tokens: rows with longer prompts are dropped.
    """
    rows, dropped, maths = [], [], []
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
            rows.append(read.row)
            maths.append(None if read.row["datasource"].startswith("kk_") else read.origin)
    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        readable = threads.map(
            lambda row, origin: origin is None or math_reward.is_readable(row["label"]), rows, maths
        )
        kept = []
        for row, origin, is_readable in zip(rows, maths, readable, strict=True):
            if is_readable:
                kept.append(row)
            else:
                dropped.append(Dropped(origin, "label", f"the grader cannot read {row['label'][:200]!r}"))
    return kept, dropped


def describe(rows: Sequence[Row], num_tokens: Callable[[Row], int] | None) -> str:
    """Sources, most frequent labels and prompt lengths, in a few lines."""
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
    """Counts a row's prompt in tokens of a Hugging Face tokenizer, as OpenRLHF sends it to vLLM."""
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


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m arlopti_openrlhf.cli.prepare_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--generate", action="store_true", help="make new puzzles")
    source.add_argument("--from", dest="files", nargs="+", metavar="FILE.parquet", help="convert published files")
    source.add_argument(
        "--dataset", nargs="+", choices=published.DATA_SETS, metavar="NAME", help=f"{', '.join(_named_sets())}"
    )
    parser.add_argument("--out", required=True, help="--generate: the folder; else the .jsonl or .parquet file")
    parser.add_argument(
        "--prompt-format",
        choices=PROMPT_FORMATS,
        default="messages",
        help="chat messages (the default), or final text; a file that this command wrote keeps its own",
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="FILE", help="drop prompts of these files, such as test sets"
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="count prompts in its tokens")
    parser.add_argument(
        "--max-prompt-tokens", type=integer(0), metavar="N", help="drop longer prompts; needs --tokenizer"
    )
    parser.add_argument("--strict", action="store_true", help="stop with an error where a row would be dropped")
    parser.add_argument(
        "--people",
        nargs="+",
        type=int,
        choices=range(knights_knaves.MIN_PEOPLE, knights_knaves.MAX_PEOPLE + 1),
        default=[2, 3],
        help="--generate: numbers of people (default: 2 3)",
    )
    parser.add_argument(
        "--train",
        type=integer(0),
        default=4000,
        help="--generate: training puzzles of each number of people (default: 4000)",
    )
    parser.add_argument(
        "--test",
        type=integer(0),
        default=256,
        help="--generate: held-out puzzles of each number of people (default: 256)",
    )
    parser.add_argument(
        "--names",
        type=int,
        choices=range(knights_knaves.MAX_PEOPLE, len(knights_knaves.NAMES) + 1),
        metavar=f"{{{knights_knaves.MAX_PEOPLE}..{len(knights_knaves.NAMES)}}}",
        default=len(knights_knaves.NAMES),
        help="--generate: how many different names occur (default: all; the small policy knows 12)",
    )
    parser.add_argument("--seed", type=int, default=0, help="--generate: the same seed writes the same bytes")
    return parser


def _named_sets() -> list[str]:
    puzzles = [name for name in published.DATA_SETS if name.startswith("kk_")]
    return [name for name in published.DATA_SETS if name not in puzzles] + [f"{puzzles[0]} ... {puzzles[-1]}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with one line on stderr and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.max_prompt_tokens is not None and not args.tokenizer:
        parser.error("argument --max-prompt-tokens: needs --tokenizer")
    for flag in ("exclude", "tokenizer", "strict"):
        if args.generate and getattr(args, flag):
            parser.error(f"argument --{flag}: not with --generate, whose puzzles are new, short and all usable")
    try:
        if args.generate:
            for name, count, held_out in (("train", args.train, False), ("test", args.test, True)):
                rows = generate_rows(
                    args.people,
                    count,
                    held_out=held_out,
                    seed=args.seed,
                    prompt_format=args.prompt_format,
                    names=knights_knaves.NAMES[: args.names],
                )
                write_rows(rows, Path(args.out) / f"{name}.jsonl")
        else:
            _convert(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _convert(args: argparse.Namespace) -> None:
    reads = chain.from_iterable(
        [published.read_file(file, args.prompt_format) for file in args.files or ()]
        + [published.read_data_set(name, args.prompt_format) for name in args.dataset or ()]
    )
    excluded = {
        published.prompt_key(read.row["prompt"]): read.origin
        for file in args.exclude
        for read in published.read_file(file, args.prompt_format)
        if read.row is not None
    }
    num_tokens = token_counter(args.tokenizer) if args.tokenizer else None
    rows, dropped = check(reads, excluded=excluded, num_tokens=num_tokens, max_tokens=args.max_prompt_tokens)
    if dropped and (args.strict or not rows):
        more = f" (and {len(dropped) - 1} more)" if len(dropped) > 1 else ""
        raise ValueError(f"{dropped[0]}{more}")
    write_rows(rows, args.out)
    print(describe(rows, num_tokens))
    listed = Path(f"{args.out}.dropped")
    if dropped:
        listed.write_text("".join(f"{row}\n" for row in dropped), encoding="utf-8")
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(Counter(row.reason for row in dropped).items()))
        print(f"  dropped: {reasons}; see {listed}")
    else:
        listed.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
