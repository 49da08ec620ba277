"""Runs the checks, and prints what they find in one list.

A check is a function of upstream's nested arguments, as its `train` gets them, that returns findings. Where one fails
itself, that is a finding too.
"""

import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight import (
    batches,
    clusters,
    data,
    disk,
    images,
    machine,
    memory,
    model,
    placement,
    reward,
    token_methods,
    values,
)
from arlopti_openrlhf.ops.preflight.finding import Finding

Check = Callable[[SimpleNamespace], list[Finding]]

# They look at the arguments alone.
QUICK: dict[str, Check] = {
    "values": values.check,
    "batches": batches.check,
}
# They look at files and at the machine, ask the reward function, and may import PyTorch.
THOROUGH: dict[str, Check] = {
    "placement": placement.check,
    "machine": machine.check,
    "clusters": clusters.check,
    "disk": disk.check,
    "memory": memory.check,
    "model": model.check,
    "images": images.check,
    "data": data.check,
    "reward": reward.check,
    "token methods": token_methods.check,
}


def run(args: SimpleNamespace, findings: list[Finding], upstream_findings: list[Finding]) -> None:
    """Check everything, and print one list. Warnings alone stop nothing.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
        findings: what is known to be wrong with them already.
        upstream_findings: what upstream's own checks say against them.

    Raises:
        SystemExit: with status 2 where the run cannot start, and after `--dry-run` with status 0 where it can.
    """
    found = findings + [finding for name, check in QUICK.items() for finding in _run(name, check, args)]
    found += _news(upstream_findings, found)
    # The thorough checks take seconds, and half of what they said would follow from what is wrong already.
    if args.dry_run or not any(finding.is_fatal for finding in found):
        for name, check in THOROUGH.items():
            found += _news(_run(name, check, args), found)
    is_fatal = any(finding.is_fatal for finding in found)
    if found:
        print(listed(found), file=sys.stderr, flush=True)
    if is_fatal:
        sys.exit(2)
    if args.dry_run:
        if estimate := memory.describe(args):
            print(f"arlopti_openrlhf: {estimate}")
        print("arlopti_openrlhf: the run can start. Nothing has been started.")
        sys.exit(0)


def refuse_if_fatal(findings: list[Finding]) -> None:
    """Print the findings and exit with status 2 if one is fatal."""
    if any(finding.is_fatal for finding in findings):
        print(listed(findings), file=sys.stderr, flush=True)
        sys.exit(2)


def listed(findings: list[Finding]) -> str:
    """Return the list that the user reads, what is fatal first."""
    errors = sum(finding.is_fatal for finding in findings)
    counts = f"errors {errors}, warnings {len(findings) - errors}"
    head = f"arlopti_openrlhf: the run {'cannot' if errors else 'can'} start: {counts}"
    ordered = sorted(findings, key=lambda finding: not finding.is_fatal)
    return "\n".join([head, *(f"  {'error' if f.is_fatal else 'warning'}: {f}" for f in ordered)])


def _run(name: str, check: Check, args: SimpleNamespace) -> list[Finding]:
    try:
        return check(args)
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"the check of {name} failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return [Finding("", "", problem, "this says nothing about the run; please report it", is_fatal=False)]


def _news(findings: list[Finding], found: list[Finding]) -> list[Finding]:
    """Return the findings without those of a flag that has to be changed anyway."""
    refused = {finding.flag for finding in found if finding.is_fatal and finding.flag}
    return [finding for finding in findings if finding.flag not in refused]
