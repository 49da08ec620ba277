"""Write training and evaluation data for OpenRLHF: new puzzles, or published sets converted. Every row is checked.

    arlopti data --generate --people 2 3 --train 4000 --test 256 --seed 0 --out data
    arlopti data --from 3ppl_train.parquet 4ppl_train.parquet --out train.jsonl
    arlopti data --dataset deepscaler --exclude math500.jsonl --out train.jsonl

The first writes data/train.jsonl and data/test.jsonl, the others one file, as parquet if its name ends in ".parquet".
A row has `prompt` (chat messages for --data.apply_chat_template, or final text), `label` (the solution) and
`datasource` ("kk_3ppl", "math500"). Give OpenRLHF the first two names as --data.input_key and --data.label_key. Rows
that training could not use are left out, counted by reason, and listed in FILE.dropped.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from arlopti_openrlhf.cli.arguments import integer
from arlopti_openrlhf.cli.bad_input import Parser, check_files, check_out, command_parser
from arlopti_openrlhf.lab.data import knights_knaves, preparation, published


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("data", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--generate", action="store_true", help="make new puzzles")
    source.add_argument("--from", dest="files", nargs="+", metavar="FILE.parquet", help="convert published files")
    sets = [name for name in published.DATA_SETS if not name.startswith("kk_")]
    help_of_sets = f"{', '.join(sets)}, kk_2ppl_train ... kk_8ppl_test"
    source.add_argument("--dataset", nargs="+", choices=published.DATA_SETS, metavar="NAME", help=help_of_sets)
    add("--out", required=True, help="folder for --generate, otherwise the .jsonl or .parquet file")
    formats = (
        "chat messages (default), which the training command renders with --data.apply_chat_template, or final text: "
        "puzzles and several turns as ChatML, which Qwen's models read, and a single turn as it is. Text that this "
        "command wrote stays as it is"
    )
    add("--prompt-format", choices=preparation.PROMPT_FORMATS, default="messages", help=formats)
    exclude = "drop prompts that occur in these files, such as test sets"
    add("--exclude", nargs="+", default=[], metavar="FILE", help=exclude)
    add("--tokenizer", metavar="MODEL", help="whose tokens --max-prompt-tokens counts")
    add("--max-prompt-tokens", type=integer(0), metavar="N", help="drop longer prompts, in tokens of --tokenizer")
    add("--strict", action="store_true", help="fail instead of dropping a row")
    people = range(knights_knaves.MIN_PEOPLE, knights_knaves.MAX_PEOPLE + 1)
    of_puzzle = "--generate: people per puzzle (default: 2 3)"
    add("--people", nargs="+", type=int, choices=people, default=[2, 3], help=of_puzzle)
    for flag, default, kind in (("--train", 4000, "training"), ("--test", 256, "held-out")):
        count = f"--generate: {kind} puzzles for each number of people (default: {default})"
        add(flag, type=integer(0), default=default, help=count)
    add("--seed", type=int, default=0, help="--generate: seed; the same seed writes the same bytes (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.max_prompt_tokens is None) != (args.tokenizer is None):
        parser.error("arguments --tokenizer and --max-prompt-tokens go together")
    for flag in ("exclude", "tokenizer", "strict"):
        if args.generate and getattr(args, flag):
            parser.error(f"argument --{flag}: not with --generate, because its puzzles are new, short and all usable")
    check_out(parser, Path(args.out), is_file=not args.generate)
    if not args.generate and Path(args.out).suffix not in (".jsonl", ".parquet"):
        parser.error(f"argument --out: {args.out}: what is converted goes into a .jsonl or .parquet file")
    for flag, files in (("--from", args.files or ()), ("--exclude", args.exclude)):
        check_files(parser, flag, files)
    try:
        if args.generate:
            _generate(args)
        else:
            _convert(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _generate(args: argparse.Namespace) -> None:
    for file, count, held_out in (("train", args.train, False), ("test", args.test, True)):
        rows = preparation.generate_rows(
            args.people,
            count,
            held_out=held_out,
            seed=args.seed,
            prompt_format=args.prompt_format,
            report=partial(print, f"{file}:"),
        )
        preparation.write_rows(rows, Path(args.out) / f"{file}.jsonl")


def _convert(args: argparse.Namespace) -> None:
    def reads(names: Sequence[str], read) -> list[published.Read]:
        return [one for name in names for one in read(name, args.prompt_format)]

    read = [(one, one.row["prompt"] if one.row else one.prompt) for one in reads(args.exclude, published.read_file)]
    if lost := [one for one, prompt in read if prompt is None]:
        raise ValueError(
            f"argument --exclude: {len(lost)} rows cannot be read, so they would not be excluded: first {lost[0]}"
        )
    excluded = {published.prompt_key(prompt): one.origin for one, prompt in read if prompt is not None}
    # Sort out what training could not use. With --strict nothing may be dropped.
    num_tokens = preparation.token_counter(args.tokenizer) if args.tokenizer else None
    found = reads(args.files or (), published.read_file) + reads(args.dataset or (), published.read_data_set)
    rows, dropped = preparation.check(
        found, excluded=excluded, num_tokens=num_tokens, max_tokens=args.max_prompt_tokens
    )
    if dropped and (args.strict or not rows):
        more = f" (and {len(dropped) - 1} more)" if len(dropped) > 1 else ""
        raise ValueError(f"{dropped[0]}{more}")
    preparation.write_rows(rows, args.out)
    if args.exclude and not any(row.reason == "excluded" for row in dropped):
        print(f"  no prompt of {', '.join(args.exclude)} occurs among them, so --exclude has dropped none")
    # List what was dropped. A list of an earlier run would be wrong now.
    listed = Path(f"{args.out}.dropped")
    if dropped:
        listed.write_text("".join(f"{row}\n" for row in dropped), encoding="utf-8")
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(Counter(row.reason for row in dropped).items()))
        print(f"  dropped: {reasons}; see {listed}")
    else:
        listed.unlink(missing_ok=True)
