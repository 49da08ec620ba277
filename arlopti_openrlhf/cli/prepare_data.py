"""Write Knights-and-Knaves data for OpenRLHF: generated puzzles, or the published parquet files converted.

    python -m arlopti_openrlhf.cli.prepare_data --generate --people 2 3 --train 4000 --test 256 --seed 0 --out data
    python -m arlopti_openrlhf.cli.prepare_data --from 3ppl_train.parquet 4ppl_train.parquet --out train.jsonl

The first writes data/train.jsonl and data/test.jsonl, the second one file; one that ends in ".parquet" is parquet.
Each row has `prompt` (chat messages for --data.apply_chat_template, or final text), `label` (the solution text) and
`datasource` ("kk_3ppl"), under the names that OpenRLHF's --data.input_key, --data.label_key and `datasource` expect.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from arlopti_openrlhf import knights_knaves
from rewards.kk_reward import grade

Row = dict[str, Any]

PROMPT_FORMATS = ("messages", "text")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)\n?<\|im_end\|>\n?", re.DOTALL)


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
    """The rows of a published parquet file: verl's `prompt`, `names` and `reward_model.ground_truth` columns.

    With "text" the prompt is the published ChatML text to the letter, `<think>` begun; with "messages" its turns are
    taken apart. ValueError, naming file and row, where a column is missing or the label is not a solution.
    """
    import pandas as pd

    path = Path(path)
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({' '.join(str(error).split())})") from error
    missing = [column for column in ("prompt", "names", "reward_model") if column not in table.columns]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}")
    rows = []
    for number, record in enumerate(table.to_dict("records")):
        try:
            rows.append(_convert(record, prompt_format))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{path}: row {number}: {error!r}") from error
    return rows


def _convert(record: dict[str, Any], prompt_format: str) -> Row:
    label = record["reward_model"]["ground_truth"]["solution_text_format"]
    grade("", label)  # refuses what the reward could not read, before a training run does
    text = record["prompt"][0]["content"]
    return {
        "prompt": text if prompt_format == "text" else _messages(text),
        "label": label,
        "datasource": knights_knaves.datasource(len(record["names"])),
    }


def _messages(text: str) -> list[dict[str, str]]:
    turns = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
    if not turns:
        raise ValueError(f"the prompt is not ChatML text: {text[:80]!r}")
    return turns


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
    parser.add_argument("--out", required=True, help="--generate: the folder; --from: the .jsonl or .parquet file")
    parser.add_argument("--prompt-format", choices=PROMPT_FORMATS, default="messages", help="default: messages")
    parser.add_argument(
        "--people",
        nargs="+",
        type=int,
        choices=range(knights_knaves.MIN_PEOPLE, knights_knaves.MAX_PEOPLE + 1),
        default=[2, 3],
        help="--generate: numbers of people (default: 2 3)",
    )
    parser.add_argument("--train", type=_count, default=4000, help="--generate: training puzzles per number of people")
    parser.add_argument("--test", type=_count, default=256, help="--generate: held-out puzzles per number of people")
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


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return count


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with one line on stderr and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
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
            rows = [row for file in args.files for row in convert_rows(file, prompt_format=args.prompt_format)]
            write_rows(rows, args.out)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
