"""Checks the token methods: that they can be loaded, take their arguments, and give weights to some made-up tokens."""

from contextlib import closing
from types import SimpleNamespace

from arlopti_openrlhf import methods
from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool
from arlopti_openrlhf.ops.preflight.combinations import NOT_BY_STEPS, is_selective
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.images import policy_sees

_FLAG = "--algo.token_method"
PROBE_SECONDS = 30.0  # for the import of files and their answers
_UNLIMITED = 2.0**20  # GiB


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what is wrong with the token methods.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    sources, arguments = methods.requested(args.algo)
    if not args.algo.token_method and not args.algo.token_method_args:
        return []  # the parser has looked at the flags of AR and Lopti
    given = " ".join(sources)
    with closing(
        WorkerPool("arlopti_openrlhf.token_method:describe", 1, PROBE_SECONDS, memory_gib=_UNLIMITED)
    ) as pool:
        try:
            found = pool.call(sources, arguments)
        except TimedOut:
            found = {"problem": f"no weights for {PROBE_SECONDS:g} s, the import of the files included"}
        except Died:
            found = {"problem": "the process that asks for weights ends"}
        except (Raised, RuntimeError) as error:
            found = {"problem": f"cannot be asked: {str(error).strip()[-200:]}"}
    if found["problem"]:
        return [Finding(_FLAG, given, found["problem"], "correct the method or --algo.token_method_args")]
    findings = []
    if readers := ", ".join(found["reading_entropies"]):
        if policy_sees(args):
            problem = f"{readers} needs entropies, which the update of a vision-language model does not give"
            findings.append(Finding(_FLAG, given, problem, "take another method, or a text model"))
        elif not is_selective(args):
            problem = f"{readers} needs entropies, which the selective update alone gives"
            findings.append(Finding(_FLAG, given, problem, "give --actor.update selective, or another method"))
    if found["passes"] > 1 and args.actor.lr_scheduler in NOT_BY_STEPS:
        problem = f"does not follow from the number of steps, of which {given} takes {found['passes']} times as many"
        remedy = "choose a schedule that does, such as constant"
        findings.append(Finding("--actor.lr_scheduler", args.actor.lr_scheduler, problem, remedy))
    return findings
