"""Finds out, in about a second and without importing anything of it, whether the installed OpenRLHF fits our code."""

import importlib.metadata
from collections.abc import Iterable

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.seams import (
    checkpoints,
    command,
    cpu,
    lifecycle,
    reference,
    run,
    samples,
    update,
    waits,
)
from arlopti_openrlhf.ops.preflight.seams.kinds import Moved, Seam, Source

TESTED = "0.11.2"  # the version that the tables were read from
COMMAND = tuple(command.SEAMS)  # without these there is no parser
ALWAYS = (
    *COMMAND,
    *update.SEAMS,
    *run.SEAMS,
    *samples.SEAMS,
    *reference.SEAMS,
    *checkpoints.SEAMS,
    *lifecycle.SEAMS,
    *waits.SEAMS,
)
PATCHED = tuple(cpu.SEAMS)  # where `cpu.enable` patches OpenRLHF


def moved(seams: Iterable[Seam]) -> list[Finding]:
    """Return a finding for each seam that is not where it was."""
    source = Source()
    findings = []
    for seam in seams:
        try:
            seam.check(source)
        except Moved as error:
            installed = _installed(seam.module.partition(".")[0])
            findings.append(
                Finding("", "", f"{error}. {seam.leans} leans on it", f"{installed} does not fit: {_remedy()}")
            )
    return findings


def version() -> list[Finding]:
    """Return a finding where OpenRLHF is not installed, or in a version that this package was not tested with."""
    try:
        found = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        return [Finding("", "", "OpenRLHF is not installed", _remedy())]
    if found == TESTED:
        return []
    problem = f"openrlhf {found} is installed, and this package was tested with {TESTED}"
    return [Finding("", "", problem, "every seam is where it was, so the run goes on", is_fatal=False)]


def _installed(top: str) -> str:
    try:
        return f"{top} {importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:  # vLLM's distribution has other names
        return f"the installed {top}"


def _remedy() -> str:
    return f"pip install openrlhf=={TESTED}, or the {TESTED} stack of requirements/lock.txt"
