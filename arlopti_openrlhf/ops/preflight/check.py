"""Runs the checks, and prints what they find in one list. Where a check fails itself, that is a finding too."""

import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight import (
    data,
    images,
    machine,
    memory,
    model,
    placement,
    reward,
    trainable,
    values,
)
from arlopti_openrlhf.ops.preflight.finding import Check, Finding, Update
from arlopti_openrlhf.terminal import say

# These look at files and at the machine, ask the reward function, and may import PyTorch.
THOROUGH: tuple[Check, ...] = (
    placement.check,
    machine.check,
    placement.check_cluster,
    machine.check_disk,
    model.check,
    trainable.check,
    images.check,
    data.check,
    reward.check,
)

_FAILED = "a check failed"


def run(
    args: SimpleNamespace,
    findings: Iterable[Finding],
    upstream_findings: Iterable[Finding],
    update: Update,
    own_checks: Iterable[Check] = (),
) -> None:
    """Check everything, and print one list. Warnings alone stop nothing.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
        findings: what is known to be wrong with them already.
        upstream_findings: what upstream's own checks say against them.
        update: how the update is computed.
        own_checks: the caller's own thorough checks.

    Raises:
        SystemExit: with status 2 where the run cannot start, and after `--dry-run` with status 0 where it can.
    """
    of_values = list(_run(values.check, args))
    refused = [finding for finding in of_values if finding.is_fatal]
    warnings = [finding for finding in of_values if not finding.is_fatal]
    findings = [*refused, *_underived([*findings, *warnings], refused)]
    for found in _run(partial(placement.check_batches, update=update), args), upstream_findings:
        findings += _news(_underived(found, refused), findings)
    # Skip the slow checks if the quick ones failed: most of their findings would be consequences.
    has_device = all(finding.flag != "ARLOPTI_DEVICE" for finding in findings)
    if (args.dry_run and has_device) or not any(finding.is_fatal for finding in findings):
        thorough: list[Check] = [*THOROUGH, partial(memory.check, update=update), *own_checks]
        for check in thorough:
            findings += _news(_underived(_run(check, args), refused), findings)
    refuse_if_fatal(findings)
    if findings:
        say(*listed(findings), file=sys.stderr)
    if first := data.describe(args):
        say(*first.split("\n"))
    if args.dry_run:
        if estimate := memory.describe(args, update):
            say(*estimate.split("\n"))
        unknown = ", except for what a check that failed would have found" * any(f.value is _FAILED for f in findings)
        say(f"the run can start{unknown}. Nothing has been started.")
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
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"a check failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        remedy = "the run may end at what it would have found; please report it"
        yield Finding("", _FAILED, problem, remedy, is_fatal=False)


def _underived(findings: Iterable[Finding], refused: Iterable[Finding]) -> list[Finding]:
    """Return the findings without those that follow from a value that is refused itself: they name its flag."""
    flags = "|".join(re.escape(finding.flag) for finding in refused if finding.flag)
    return [finding for finding in findings if not (flags and re.search(rf"({flags})(?![\w.])", str(finding)))]


def _news(findings: Iterable[Finding], earlier: Iterable[Finding]) -> list[Finding]:
    """Return the findings without those of a flag that has to be changed anyway."""
    refused = {finding.flag for finding in earlier if finding.is_fatal and finding.flag}
    return [finding for finding in findings if finding.flag not in refused]
