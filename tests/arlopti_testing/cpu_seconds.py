"""What a command costs on a machine that is busy with others too."""

import resource


def of_children() -> float:
    """Return the CPU time in seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
