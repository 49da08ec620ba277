"""Token-level updates for OpenRLHF: Advantage Reweighting (AR) and Low-Probability Token Isolation (Lopti) of
*Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs* (arXiv 2505.12929).

The mathematics is in `arlopti_openrlhf.token_update` (torch alone). `arlopti train` is OpenRLHF's own training command
with the methods' flags added. `install` gives the methods to a launcher of one's own.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

__version__ = "0.1.0"


def install(
    *methods: str,
    arguments: Sequence[str] = (),
    normalize: bool = False,
    scope: str = "batch",
    update: str = "selective",
) -> None:
    """Let OpenRLHF's `train` of this process update by token methods, and change nothing else.

    Call it before OpenRLHF is imported, on the driver, and with the constants that `arlopti train` would get:

        import arlopti_openrlhf
        arlopti_openrlhf.install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"])

    The workers need this package too. A machine without a GPU then computes on its CPU.

    Args:
        methods: token methods, by name or as Python files (docs/token_methods.md).
        arguments: their constants, as `name.key=value`.
        normalize: whether weights are divided by their mean over each rollout batch.
        scope: "batch" or "minibatch": when Lopti updates the second group (`--algo.lopti.scope`).
        update: "selective" computes what the update needs, "stock" as OpenRLHF does (`--actor.update`).

    Raises:
        ValueError: a method, an argument or a value is wrong.
        RuntimeError: OpenRLHF is imported already, or is not one that this package was tested with.
    """
    if "openrlhf.trainer.ray.ppo_actor" in sys.modules:
        raise RuntimeError("arlopti_openrlhf.install() must be called before OpenRLHF is imported")
    for name, value, choices in (("scope", scope, ("batch", "minibatch")), ("update", update, ("selective", "stock"))):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: must be {' or '.join(choices)}")
    if not methods:
        raise ValueError("install() needs a token method, such as 'ar'")
    from arlopti_openrlhf import bindings, cpu, token_method, upstream  # import PyTorch

    # The workers, which load these files, have a working directory of their own.
    sources = [str(Path(method).absolute()) if method.endswith(".py") else method for method in methods]
    token_method.load(sources, arguments)
    moved = [*upstream.check_versions(["openrlhf"]), *upstream.check_bodies(["update"])]
    if fatal := [str(difference) for difference in moved if difference.is_fatal]:
        raise RuntimeError("; ".join(fatal))
    cpu.enable()
    from arlopti_openrlhf.update.settings import Settings  # imports OpenRLHF

    settings = Settings(sources, list(arguments), normalize, scope, statistics="off")
    bindings.bind({bindings.SELECTIVE} if update == "selective" else set(), settings=settings)
