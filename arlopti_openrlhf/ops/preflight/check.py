"""Runs the checks, and prints what they find in one list. Where a check fails itself, that is a finding too."""

import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight import data, machine, memory, model, placement, reward, values
from arlopti_openrlhf.ops.preflight.finding import Check, Finding, Update
from arlopti_openrlhf.terminal import say

# These look at files and at the machine, ask the reward function, and may import PyTorch.
THOROUGH: tuple[Check, ...] = (
    placement.check,
    placement.check_cluster,
    machine.check,
    machine.check_disk,
    model.check,
    data.check,
    reward.check,
)


def run(
    args: SimpleNamespace,
    findings: Iterable[Finding],
    upstream_findings: Iterable[Finding],
    update: Update,
    own_checks: Iterable[Check] = (),
) -> None:
    """Check everything, and print one list. Warnings alone stop nothing.

    What is fatal among values and flags ends the checks, since the thorough ones would find its consequences.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
        findings: what is known to be wrong with them already.
        upstream_findings: what upstream's own checks say against them.
        update: how the update is computed.
        own_checks: the caller's own thorough checks.

    Raises:
        SystemExit: with status 2 where the run cannot start, and after `--dry-run` with status 0 where it can.
    """
    found = [*findings, *upstream_findings, *_run(values.check, args)]
    refuse_if_fatal(found)
    of_update: list[Check] = [partial(check, update=update) for check in (placement.check_batches, memory.check)]
    for check in [*of_update, *THOROUGH, *own_checks]:
        found += _run(check, args)
    refuse_if_fatal(found)
    if found:
        say(*listed(found), file=sys.stderr)
    if first := data.describe(args):
        say(*first.split("\n"))
    if args.dry_run:
        if estimate := memory.describe(args, update):
            say(*estimate.split("\n"))
        say("the run can start. Nothing has been started.")
        sys.exit(0)


def refuse_if_fatal(findings: list[Finding]) -> None:
    """Print the findings and exit with status 2 if one is fatal."""
    if any(finding.is_fatal for finding in findings):
        say(*listed(findings), file=sys.stderr)
        sys.exit(2)


def listed(findings: list[Finding]) -> list[str]:
    """Return the lines of the list that the user reads, what is fatal first."""
    errors = sum(finding.is_fatal for finding in findings)
    counts = f"errors {errors}, warnings {len(findings) - errors}"
    head = f"the run {'cannot' if errors else 'can'} start: {counts}"
    ordered = sorted(findings, key=lambda finding: not finding.is_fatal)
    return [head, *(f"  {'error' if f.is_fatal else 'warning'}: {f}" for f in ordered)]


def _run(check: Check, args: SimpleNamespace) -> Iterator[Finding]:
    try:
        yield from check(args)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"a check failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        remedy = "the run may end at what it would have found; please report it"
        yield Finding("", "", problem, remedy, is_fatal=False)
