"""Inject faults into tiny real trainings, one case after the other, and say what each cost.

    python -m chaos.run                     # all 30
    python -m chaos.run --short             # one run that five faults hit, as in `make long`
    python -m chaos.run --only "*SIGTERM*"

A case starts the training, injects its fault, and looks how the start ends: with the exit status and the cause that it
should have, without a process left. The next start must find the newest whole checkpoint and train to the end, and no
prompt may be missing. Exit status 1: some case did not go so. Logs stay in --out.
"""

import argparse
import fnmatch
import math
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from arlopti_openrlhf.cli.arguments import integer
from chaos.faults import CASES, SHORT, Case, Start
from chaos.training import GRACE_SECONDS, PROMPTS, SAVE_EVERY, STEPS, Training, make_inputs, trained_prompts


@dataclass
class Outcome:
    """What a case came to.

    Attributes:
        noticed: seconds from the last fault to the line that names it, or to the end of the start that it hit.
        lost: steps that were trained again.
        wrong: what did not go as it must. Empty: survived.
    """

    noticed: float = math.nan
    lost: int = 0
    wrong: list[str] = field(default_factory=list)


def run_case(case: Case, inputs: Path, folder: Path, seed: int) -> Outcome:
    """Run a case in an empty folder. The same seed injects at the same random moments."""
    rng, outcome, trained = random.Random(f"{seed} {case.name}"), Outcome(), list[int]()
    try:
        is_done = False
        for start in case.starts:
            is_done = _hit(start, case, inputs, folder, rng, outcome, trained) == 0
        if not is_done:
            damage = case.damage(folder, rng) if case.damage else ""
            last = Training(inputs, folder, ranks=case.ranks)
            try:
                status, _ = last.wait("")
                trained += last.steps()
                _expect(status == 0, f"{last.log.name}: exit status {status}", outcome)
                _expect(case.passes_over in last.text, f"{last.log.name} does not say that {damage}", outcome)
            finally:
                _expect_nothing_left(last, outcome)
        allowed = sum(start.lost for start in case.starts) + SAVE_EVERY * bool(case.damage)
        outcome.lost = len(trained) - STEPS
        _expect(set(trained) == set(range(1, STEPS + 1)), f"steps {trained}", outcome)
        _expect(0 <= outcome.lost <= allowed, f"{outcome.lost} steps lost, at most {allowed}", outcome)
        _expect((folder / "final" / "model.safetensors").exists(), "no final model", outcome)
        _expect(set(trained_prompts(folder)) == set(range(STEPS * PROMPTS)), "prompts are missing", outcome)
    except (TimeoutError, LookupError, OSError) as error:
        outcome.wrong.append(str(error))
    return outcome


def _hit(
    start: Start, case: Case, inputs: Path, folder: Path, rng: random.Random, outcome: Outcome, trained: list[int]
) -> int:
    """Start the training, inject the fault, and return the exit status."""
    (folder / "faulted").unlink(missing_ok=True)
    training = Training(
        inputs,
        folder,
        ranks=case.ranks,
        module=start.module,
        flags=start.flags,
        environment=start.environment,
        prefix=start.prefix,
    )
    try:
        if start.act:
            start.act(training, rng)
            (folder / "faulted").touch()
        status, said = training.wait(start.says)
        end, text = time.time(), training.text
        _expect((folder / "faulted").exists(), f"{training.log.name}: the fault did not come", outcome)
        if (folder / "faulted").exists():
            outcome.noticed = (said or end) - (folder / "faulted").stat().st_mtime
        _expect(
            status in start.exits, f"{training.log.name}: exit status {status}, not {sorted(start.exits)}", outcome
        )
        _expect(start.says in text, f"{training.log.name} does not say {start.says!r}", outcome)
        _expect(status == 0 or not (folder / "final").exists(), f"{training.log.name}: saved a final model", outcome)
        trained += training.steps()
    finally:
        _expect_nothing_left(training, outcome)
    return status


def _expect(holds: object, otherwise: str, outcome: Outcome) -> None:
    if not holds:
        outcome.wrong.append(otherwise)


def _expect_nothing_left(training: Training, outcome: Outcome) -> None:
    """Note processes that are left some time after the driver's end, and kill them."""
    until = time.monotonic() + GRACE_SECONDS
    while training.is_over() and training.processes() and time.monotonic() < until:
        time.sleep(0.5)
    if rest := training.kill_rest():
        outcome.wrong.append(f"{training.log.name}: {len(rest)} processes left: {', '.join(rest)}")


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
    cases = [case for case in (SHORT if args.short else CASES) if fnmatch.fnmatchcase(case.name, args.only)]
    if not cases:
        parser.error(f"argument --only: {args.only} matches no case")
    # A shell lets the jobs in its background ignore SIGINT, and the trainings would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    out = args.out.resolve()
    make_inputs(out)
    start = time.monotonic()

    def run(number: int) -> Outcome:
        case = cases[number]
        outcome = run_case(case, out, out / f"{number:02d}", args.seed)
        print(
            f"{'  ok' if not outcome.wrong else 'FAIL'}  {case.name}{''.join(f'; {w}' for w in outcome.wrong)}",
            flush=True,
        )
        return outcome

    with ThreadPoolExecutor(args.parallel) as pool:
        outcomes = dict(zip((case.name for case in cases), pool.map(run, range(len(cases))), strict=True))
    survived = sum(not outcome.wrong for outcome in outcomes.values())
    report = table(outcomes)
    (out / "table.md").write_text(report + "\n", encoding="utf-8")
    print(
        f"\n{report}\n\n{survived} of {len(cases)} survived, {(time.monotonic() - start) / 60:.1f} minutes, "
        f"seed {args.seed}"
    )
    sys.exit(survived < len(cases))


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="one run, which five faults hit, as in make long")
    parser.add_argument("--only", default="*", metavar="PATTERN", help='cases by name, as in "kill*" (default: all)')
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the damage (default: 0)")
    parser.add_argument(
        "--parallel",
        type=integer(1),
        default=max(1, (os.cpu_count() or 1) // 2),
        help="cases at a time (default: one for two cores)",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/chaos"), help="folder for everything; it is emptied")
    return parser


if __name__ == "__main__":
    main()
