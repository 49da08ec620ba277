"""Keeps the keys of a run, which its rewards do not need, from the processes that run a reward function."""

import os
import re

_SECRETS = re.compile(
    "HF_TOKEN|HUGGING_?FACE_?HUB_(API_)?TOKEN|RAY_AUTH_TOKEN|WANDB_API_KEY|ARLOPTI_REWARD_(TOKEN|SECRET_.*)"
)
_PROXY = re.compile("(?:https?|ftp|all)_proxy", re.IGNORECASE)


def without_secrets() -> dict[str, str]:
    """Return this process's environment without the keys of the hub, Ray, wandb and a reward server.

    A proxy's address stays, without its user and password. Keys of services that a reward may ask stay, too.
    """
    kept = {name: value for name, value in os.environ.items() if not _SECRETS.fullmatch(name)}
    return {
        name: re.sub(r"^(\w+://)?.*@", r"\1", value) if _PROXY.fullmatch(name) else value
        for name, value in kept.items()
    }
