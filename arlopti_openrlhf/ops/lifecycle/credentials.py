"""Takes keys from the environment alone, and hands them to the workers of a run. No file of the run has one.

The arguments hold the name of a variable: `WANDB_API_KEY`, or `${NAME}` in the URL of a reward server, which is
printed as it is written. `ARLOPTI_REWARD_TOKEN` is sent to reward servers as a bearer token.
"""

import argparse
import json
import os
import re

WANDB, TOKEN = "WANDB_API_KEY", "ARLOPTI_REWARD_TOKEN"
_NAME = re.compile(r"\$\{(\w+)\}")


def hide(flat: argparse.Namespace) -> None:
    """Move wandb's key from the flat arguments to the environment."""
    key = vars(flat)["logger.wandb.key"]
    if key and key != WANDB:
        os.environ[WANDB] = key
        vars(flat)["logger.wandb.key"] = WANDB


def without_user(source: str) -> str:
    """Return a source of rewards. argparse refuses a URL with a user or a password in it, which it does not print."""
    if "@" in source and not source.endswith(".py"):
        problem = "it has a user or a password in it"
        raise argparse.ArgumentTypeError(f"{problem}: set {TOKEN} to a token, or write ${{NAME}} for a variable")
    return source


def collect(wandb_key: str | None, urls: list[str] | None) -> dict[str, str]:
    """Return the secrets of a run, by variable."""
    names = [TOKEN, *([WANDB] if wandb_key else []), *_NAME.findall(",".join(urls or []))]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def send(secrets: dict[str, str]) -> None:
    """Hand the secrets to the workers of this job, through Ray's key-value store, which is in memory."""
    from arlopti_openrlhf.ops.lifecycle import stopping  # imports Ray

    stopping.put("credentials", json.dumps(secrets))


def receive() -> None:
    """Put the job's secrets into this process's environment, if it is a worker of Ray."""
    from arlopti_openrlhf.ops.lifecycle import stopping

    os.environ.update(json.loads(stopping.get("credentials") or "{}"))


def missing(url: str) -> list[str]:
    """Return the variables that the URL names and that have no value."""
    return [name for name in _NAME.findall(url) if not os.environ.get(name)]


def expand(url: str) -> str:
    """Return the URL with the values of its variables, for use and not for show."""
    return _NAME.sub(lambda match: os.environ.get(match[1], ""), url)


def headers() -> dict[str, str]:
    """Return what authenticates a request to a reward server."""
    return {"Authorization": f"Bearer {os.environ[TOKEN]}"} if os.environ.get(TOKEN) else {}


def mask(text: str, url: str) -> str:
    """Return `text`, such as a server's error, with the names of variables in place of a run's secrets."""
    for name, secret in collect(None, [url]).items():
        text = text.replace(secret, f"${{{name}}}")
    return text
