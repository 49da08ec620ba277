"""Run the study of AR and Lopti on Knights and Knaves, or that of the family, unattended.

    python -m study.run --dry-run          # list the runs, and which of them are done
    python -m study.run                    # whatever is not done yet, seed by seed
    python -m study.run --only "lopti-*"
    python -m study.run --tuning           # the baseline's learning rates
    python -m study.run --family           # the family of token methods, in two conditions
    python -m study.run --controls --results study/results/by_structure.jsonl
    python -m study.run --next --results study/results/next.jsonl    # CW-GRPO and GMTS, and GRPO beside them

Run it in the repository's root. Runs of AR and Lopti go through the real command. They share one Ray cluster, which
lives as long as this process. Those of the family are trained in one process each (`study.in_process`).

Each run adds one line to its study's file in study/results. A run whose line is there, with the same configuration, is
left out. The lines of both studies are on an earlier split of the puzzles. A new run of theirs needs another
--results.
So an interrupted study continues where it stopped, on any machine. A run that fails is named at the end, and tried
again the next time. `python -m study.report` makes the tables and the picture.
"""

import argparse
import fnmatch
import os
import sys
from pathlib import Path

from arlopti_openrlhf.cli.arguments import number
from study import runs
from study.runs import ROOT
from study.scheduler import Scheduler
from study.stored import AR_LOPTI, FAMILY, RESULTS, is_done, refuse_another_split

_GIB_PER_RUN = 8  # resident memory of a run's processes, and what a warm start adds


def main() -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    selected = [run for run in args.selection if fnmatch.fnmatchcase(run.name, args.only)]
    if not selected:
        parser.error(f"argument --only: {args.only} matches no run")
    of_study = FAMILY if selected[0].is_in_process else AR_LOPTI
    results = args.results or RESULTS / of_study
    open_runs = [run for run in selected if not is_done(run, results)]
    print(f"{len(selected) - len(open_runs)} of {len(selected)} runs are done", flush=True)
    if args.dry_run:
        for run in selected:
            print(f"{'open' if run in open_runs else 'done'}  {run.name:<28} {run.flags}")
    elif open_runs:
        try:
            refuse_another_split(results)
        except ValueError as error:
            parser.error(f"argument --results: {error}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        most = max(1, int(memory // _GIB_PER_RUN))
        parallel = min(most, os.cpu_count() or 1) if args.parallel is None else args.parallel
        if not 1 <= parallel <= most:
            parser.error(f"argument --parallel: {parallel} runs need {_GIB_PER_RUN} GiB each, of {memory:.0f}")
        scheduler = Scheduler(args.work.resolve(), results, parallel, args.timeout_minutes * 60)
        sys.exit(scheduler.run(open_runs))


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m study.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help='runs by name, as in "both-*" (default: all)')
    which = parser.add_mutually_exclusive_group()
    for name, selection, what in (
        ("--tuning", runs.TUNING, "the runs that chose the baseline's learning rate"),
        ("--family", runs.FAMILY, "the family of token methods, in two conditions (docs/results.md)"),
        ("--controls", runs.FAMILY_CONTROLS, "of the family, GRPO, Lopti and GRPO with twice the steps"),
        ("--next", runs.NEXT, "CW-GRPO, GMTS and GRPO, in the family's conditions"),
    ):
        which.add_argument(name, dest="selection", action="store_const", const=selection, help=what)
    parser.set_defaults(selection=runs.STUDY)
    parser.add_argument("--dry-run", action="store_true", help="list the runs, and start none")
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs at a time, on a core each (default: as many as cores and memory allow)",
    )
    parser.add_argument(
        "--timeout-minutes",
        type=number("(0, inf)"),
        default=90,
        help="time after which a run counts as failed (default: 90)",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help=".jsonl file of the results (default: the study's)"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "variants", help="folder for models and logs")
    return parser


if __name__ == "__main__":
    main()
