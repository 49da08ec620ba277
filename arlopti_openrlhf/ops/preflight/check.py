"""Runs the checks, and prints what they find in one list."""

import sys
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight import data, machine, model, placement, rehearsal, reward, values
from arlopti_openrlhf.ops.preflight.finding import Check, Finding, Update
from arlopti_openrlhf.terminal import say

# These look at files and at the machine, load and grade data as the run does, and import PyTorch.
THOROUGH: tuple[Check, ...] = (
    placement.check,
    placement.check_cluster,
    machine.check,
    machine.check_disk,
    model.check,
    data.check,
    data.describe,
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
        own_checks: the caller's own thorough checks. Each can be pickled by its name.

    Raises:
        SystemExit: with status 2 where the run cannot start, and after `--dry-run` with status 0 where it can.
    """
    found = list(values.check_ranges(args))
    refuse_if_fatal(found)
    found += [*findings, *values.check(args)]
    named = {finding.flag for finding in found if finding.is_fatal}
    found += [finding for finding in upstream_findings if finding.flag not in named]
    refuse_if_fatal(found)
    checks: list[Check] = [partial(placement.check_batches, update=update), *THOROUGH, *own_checks]
    answers = list(rehearsal.run(checks, args))
    found += [answer for answer in answers if isinstance(answer, Finding)]
    refuse_if_fatal(found)
    if found:
        say(*listed(found), file=sys.stderr)
    for text in answers:
        if isinstance(text, str):
            say(*text.split("\n"))
    if args.dry_run:
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
