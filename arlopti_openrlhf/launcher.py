"""Gives the methods to a launcher of one's own, which calls OpenRLHF's `train`.

from arlopti_openrlhf.launcher import install
install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"])
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf import bindings, hardware, upstream
from arlopti_openrlhf.update.settings import Settings


def install(
    *methods: str,
    arguments: Sequence[str] = (),
    normalize: bool = False,
    scope: str = "batch",
    update: str = "selective",
) -> None:
    """Let OpenRLHF's `train` of this process update by token methods, and change nothing else.

    Call it on the driver, before OpenRLHF is imported. The workers need this package too. A machine without a GPU
    computes on its CPU.

    Args:
        methods: token methods, by name or as Python files (docs/token_methods.md).
        arguments: their constants, as `name.key=value`.
        normalize: whether weights are divided by their mean over each rollout batch.
        scope: "batch" or "minibatch": when Lopti updates the second group (`--algo.lopti.scope`).
        update: "selective" computes what the update needs, "stock" as OpenRLHF does (`--actor.update`).

    Raises:
        ValueError: a method, an argument or a value is wrong, or needs the selective update.
        RuntimeError: OpenRLHF is imported already, or is not one that this package was tested with.
    """
    if "openrlhf.trainer.ray.ppo_actor" in sys.modules:
        raise RuntimeError("install() must be called before OpenRLHF is imported")
    for name, value, choices in (("scope", scope, ("batch", "minibatch")), ("update", update, ("selective", "stock"))):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: must be {' or '.join(choices)}")
    if not methods:
        raise ValueError("install() needs a token method, such as 'ar'")
    if scope != "batch" and "lopti" not in methods:
        raise ValueError(f"scope={scope!r}: Lopti is off")
    # The workers, which load these files, have a working directory of their own.
    sources = [str(Path(method).absolute()) if method.endswith(".py") else method for method in methods]
    settings = Settings(tuple(sources), tuple(arguments), normalize, scope, statistics="off")
    settings.load_for(update == "selective")
    has = bindings.of_update(update == "selective", has_methods=True)
    if hardware.uses_cpu():
        has.add(bindings.WITHOUT_CUDA)
    moved = list(upstream.check_version())
    if not any(difference.is_fatal for difference in moved):
        moved += upstream.check_bodies({row.room for row in bindings.rows(has)})
    if fatal := [str(difference) for difference in moved if difference.is_fatal]:
        raise RuntimeError("; ".join(fatal))
    if hardware.uses_cpu() or not hardware.has_flash_attn():
        from arlopti_openrlhf import cpu

        cpu.enable()
    bindings.bind(has, settings=settings)
