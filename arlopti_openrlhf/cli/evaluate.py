"""Measure the accuracy of models per data source with vLLM offline, on GPU or CPU, and tabulate it.

    arlopti evaluate --model BASE TRAINED --data kk_test.jsonl aime.jsonl --out results \\
        --sampling "*:n=8,t=1" --sampling "kk_*:n=1,t=0" --sampling "aime:n=16,t=1"
    arlopti evaluate --model run/checkpoints --last 3 --data kk_test.jsonl --out results \\
        --sampling "kk_*:n=1,t=0" --sampling "kk_*:n=1,t=1"

Writes results/MODEL.responses.jsonl with every response, results/MODEL.json with the measures, results/table.md and
results/table.csv. An evaluation that was interrupted continues where it stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli import reward_source
from arlopti_openrlhf.cli.arguments import add_data_flags, integer, template_of
from arlopti_openrlhf.cli.bad_input import Parser, check_models, check_out, command_parser
from arlopti_openrlhf.evaluation.sampling import Sampling, parse_sampling, unmatched
from arlopti_openrlhf.lab.scoring import tables
from arlopti_openrlhf.lab.scoring.inputs import ADAPTER, encode, expand_models, rows_of
from arlopti_openrlhf.ops.preflight.model import local_folder
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError


def main() -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    check_out(parser, args.out)
    try:
        models = expand_models(args.model, args.last)
    except ValueError as error:
        parser.error(str(error))
    folders = {value: list(expand_models([value], args.last)) for value in args.model if args.last}
    checkpoints = {Path(value).name: names for value, names in folders.items() if len(names) > 1}
    if args.last and not checkpoints:
        parser.error(f"argument --last {args.last}: no --model is a directory of several checkpoints")
    check_models(parser, "--model", [model for model in models.values() if not Path(model, ADAPTER).exists()])
    # Read all of the data first. A row that lacks something should not end an evaluation half way.
    try:
        rows = rows_of(args)
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    sources = sorted({row["datasource"] for row in rows})
    for pattern in unmatched(args.sampling, sources):
        parser.error(f"argument --sampling: {pattern} matches no source of the data, which are {', '.join(sources)}")
    reward_source.check(parser, args.reward, rows, says=len(models) == 1)  # with several, each process does
    args.out.mkdir(parents=True, exist_ok=True)
    if len(models) > 1:
        # In a process each, since an engine does not give back all that it holds.
        for model in models.values():
            if subprocess.run(command_for(model, args)).returncode:
                parser.exit(1, f"{parser.prog}: {model} could not be evaluated\n")
    else:
        from transformers import AutoTokenizer

        from arlopti_openrlhf.lab.scoring import offline
        from arlopti_openrlhf.lab.scoring.adapters import merged

        template = template_of(args)
        settings = offline.ScoringSettings(args.sampling, args.greedy, args.max_new_tokens, args.seed, template)
        ((name, model),) = models.items()
        try:
            model = merged(model, args.out / f"{name}.merged")
            if folder := local_folder(model):  # vLLM takes long to load, and a tokenizer does not
                encode(AutoTokenizer.from_pretrained(folder), [row["prompt"] for row in rows], template)
        except ValueError as error:
            parser.error(str(error))
        try:
            offline.evaluate(name, model, rows, settings, args.out, reward_source.load(parser, args))
        except RewardError as error:
            parser.exit(1, f"{parser.prog}: {terminal.one_line(error)}\n")
    # The tables come from the files that every evaluation leaves, also those of an earlier run.
    results = {name: json.loads((args.out / f"{name}.json").read_text(encoding="utf-8")) for name in models}
    for title, names in checkpoints.items():
        results[f"{title}, mean of {len(names)}"] = tables.mean_of([results[name] for name in names])
    (args.out / "table.md").write_text(tables.markdown(results), encoding="utf-8")
    tables.write_csv(results, args.out / "table.csv")
    print(tables.markdown(results), end="")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--model", nargs="+", required=True, help="Hugging Face directories or names, or a directory of checkpoints")
    add("--data", nargs="+", required=True, help="files that `arlopti data` wrote, or others with these keys")
    add_data_flags(parser)
    add("--out", type=Path, required=True, help="folder to write")
    add(
        "--sampling",
        action="append",
        type=parse_sampling,
        default=[Sampling("*", 8, 1.0)],
        metavar="PATTERN:n=N,t=T",
        help="samples per problem, and their temperature, for the sources that match. The last pattern that matches "
        'counts; given twice, it samples in both ways (default: "*:n=8,t=1")',
    )
    reward_source.add_flag(parser)
    last = "of a directory of checkpoints, evaluate the last N, and tabulate their mean, too"
    add("--last", type=integer(1), metavar="N", help=last)
    add("--greedy", action="store_true", help="also answer every problem once at temperature 0")
    add("--max-new-tokens", type=integer(1), default=4096, help="longest response in tokens (default: 4096)")
    add("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    return parser


def command_for(model: str, args: argparse.Namespace) -> list[str]:
    """Return the command that evaluates one of the models with the same settings."""
    return [
        *(sys.executable, "-P", "-m", "arlopti_openrlhf", "evaluate", "--model", model, "--out", str(args.out)),
        *("--data", *args.data, f"--data.input_key={args.input_key}", f"--data.label_key={args.label_key}"),
        *(f"--max-new-tokens={args.max_new_tokens}", f"--seed={args.seed}"),
        *(f"--sampling={spec}" for spec in args.sampling[1:]),  # without the default
        *(["--data.chat_template_args", *args.chat_template_args] if args.chat_template_args else []),
        *(["--data.apply_chat_template"] if args.is_message else []),
        *([f"--data.input_template={args.input_template}"] if args.input_template else []),
        *(["--greedy"] if args.greedy else []),
        *([f"--reward={args.reward}"] if args.reward else []),
    ]
