"""Inject faults into tiny real trainings, and say what each cost.

    make chaos                     # all cases, one after the other
    make chaos ARGS='--only "*SIGTERM*"'
    make chaos ARGS='--nemesis --seed 3'  # one run that eight faults hit, drawn at random

A case starts the training, injects its fault, and looks how the start ends: with the exit status and the cause that it
should have, without a process left. The next start must find the newest whole checkpoint and train to the end, and no
prompt may be missing. The nemesis also compares the run with one that nothing hit: its weights and its optimizer's
state must be equal bit for bit. Exit status 1: something did not go so. Logs stay in --out.
"""

import argparse
import fnmatch
import math
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos import nemesis
from chaos.cases import Outcome, run_case
from chaos.faults import CASES, name_of
from chaos.training import make_inputs

from arlopti_openrlhf.cli.arguments import integer


def table(outcomes: dict[str, Outcome]) -> str:
    """Return a Markdown table of the cases."""
    lines = ["| fault | noticed after | steps trained again | survived |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        noticed = "-" if math.isnan(outcome.noticed) else f"{outcome.noticed:.1f} s"
        verdict = f"**no**: {'; '.join(outcome.wrong)}" if outcome.wrong else "yes"
        lines.append(f"| {name} | {noticed} | {outcome.lost} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    # A shell lets the jobs in its background ignore SIGINT, and the trainings would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = (args.out or Path("outputs/nemesis" if args.nemesis else "outputs/chaos")).resolve()
    if args.nemesis:
        record = nemesis.run(out, args.seed)
        print(record.line())
        sys.exit(bool(record.wrong))
    cases = [case for case in CASES if fnmatch.fnmatchcase(name_of(case), args.only)]
    if not cases:
        parser.error(f"argument --only: {args.only} matches no case")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    make_inputs(out)
    start = time.monotonic()

    def run(number: int) -> Outcome:
        case = cases[number]
        outcome = run_case(case, out, out / f"{number:02d}", args.seed)
        wrong = "".join(f"; {what}" for what in outcome.wrong)
        print(f"{'FAIL' if wrong else '  ok'}  {name_of(case)}{wrong}", flush=True)
        return outcome

    with ThreadPoolExecutor(args.parallel) as pool:
        outcomes = dict(zip(map(name_of, cases), pool.map(run, range(len(cases))), strict=True))
    survived = sum(not outcome.wrong for outcome in outcomes.values())
    report = table(outcomes)
    (out / "table.md").write_text(report + "\n", encoding="utf-8")
    minutes = (time.monotonic() - start) / 60
    print(f"\n{report}\n\n{survived} of {len(cases)} survived, {minutes:.1f} minutes, seed {args.seed}")
    sys.exit(survived < len(cases))


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nemesis", action="store_true", help="one run, which eight faults hit, drawn at random")
    parser.add_argument("--only", default="*", metavar="PATTERN", help='cases by name, as in "kill*" (default: all)')
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument(
        "--parallel",
        type=integer(1),
        default=max(1, (os.cpu_count() or 1) // 2),
        help="cases at a time (default: one for two cores)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for everything; it is emptied, but for the nemesis's other seeds and its run that nothing hits "
        "(default: outputs/chaos, outputs/nemesis)",
    )
    return parser


if __name__ == "__main__":
    main()
