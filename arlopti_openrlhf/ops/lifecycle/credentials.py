"""Keeps keys and passwords out of all that a run prints and stores.

In the arguments stands the name of an environment variable in place of a secret. Printed arguments, trackers and
reports so show the name. The secrets themselves reach the workers through Ray's key-value store, which is in memory.
"""

import argparse
import itertools
import json
import os
import re

WANDB = "WANDB_API_KEY"
_REWARD = "ARLOPTI_REWARD_SECRET"
_HIDDEN = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<=://)[^/#]+(?=@)")  # and password
_VALUE = re.compile(r"(?<==)[^&#]+")  # in the query


def hide(flat: argparse.Namespace) -> None:
    """Move the secrets in the flat arguments to the environment: wandb's key, and passwords and tokens in URLs.

    A user may write `${NAME}` in a URL, or WANDB_API_KEY as the key, and so keep the secret from the command line too.
    """
    value = vars(flat)
    key, urls = value["logger.wandb.key"], value["reward.remote_url"]
    if key and key != WANDB:
        os.environ[WANDB] = key
        value["logger.wandb.key"] = WANDB
    if urls:
        value["reward.remote_url"] = ",".join(_hide_in_url(url, i) for i, url in enumerate(urls.split(",")))


def _hide_in_url(url: str, number: int) -> str:
    if "://" not in url:
        return url  # a file
    names = (f"{_REWARD}_{number}_{i}" for i in itertools.count())

    def hide_match(match: re.Match) -> str:
        if _HIDDEN.fullmatch(match[0]):
            return match[0]
        os.environ[name := next(names)] = match[0]
        return f"${{{name}}}"

    before, question, query = url.partition("?")
    return _USER.sub(hide_match, before) + question + _VALUE.sub(hide_match, query)


def collect(wandb_key: str | None, urls: list[str] | None) -> dict[str, str]:
    """Return the secrets that the arguments name, by variable."""
    names = [WANDB] if wandb_key else []
    names += _HIDDEN.findall(",".join(urls or []))
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def send(secrets: dict[str, str]) -> None:
    """Hand the secrets to the workers of this job."""
    # The command hides secrets before it imports anything heavy.
    from arlopti_openrlhf.ops.lifecycle import stopping

    stopping.put("credentials", json.dumps(secrets))


def receive() -> None:
    """Put the job's secrets into this process's environment, if it is a worker of Ray."""
    import ray

    from arlopti_openrlhf.ops.lifecycle import stopping

    if ray.is_initialized():
        os.environ.update(json.loads(stopping.get("credentials") or "{}"))


def expand(url: str) -> str:
    """Return the URL with its secrets, for use and not for show."""
    return _HIDDEN.sub(lambda match: os.environ.get(match[1], ""), url)


def mask(text: str, url: str) -> str:
    """Return `text` with the names of the secrets of `url` in place of the secrets."""
    for name in _HIDDEN.findall(url):
        if secret := os.environ.get(name):
            text = text.replace(secret, f"${{{name}}}")
    return text
