"""Keeps keys and passwords out of all that a run prints and stores.

In the arguments stands the name of an environment variable in place of a secret. Printed arguments, trackers and
reports so show the name. The secrets themselves reach the workers through Ray's key-value store, which is in memory.
"""

import argparse
import base64
import html
import itertools
import json
import os
import re
from urllib.parse import quote, quote_plus, unquote

from arlopti_openrlhf.grading import REWARDS

WANDB = "WANDB_API_KEY"
_REWARD = "ARLOPTI_REWARD_SECRET"
_NAME = re.compile(r"\$\{(\w+)\}")
_NEXT_URL = re.compile(r",\s*(?=\w[\w+.-]*://)")  # another comma may belong to a password
# Scheme, user with password, host with port, path, and the rest. A host alone may have lost its scheme. Where no port
# follows the host, what has a / in it that should have been escaped is a password still.
_URL = re.compile(
    r"(?P<scheme>\w[\w+.-]*:/*)?(?:(?P<user>[^/?#]*|(?=[^/?#]*:(?!\d*(?:[/?#]|$))).*)@)?(?P<host>[^/?#]*)"
    r"(?P<path>[^?#]*)(?P<rest>.*)",
    re.DOTALL,
)
_IS_URL = re.compile(r"[^/]*[:@]|.*[@?]")
_USER = re.compile(r"[^:/?#@]+")
_SEGMENT = re.compile(r"[^/,]+")  # a comma in a path may be that before a URL without its scheme, which is refused
_ARGUMENT = re.compile(r"(?P<name>[?&;#](?:[^&;#=]*=)?)(?P<value>[^&;#]+)")
_SHORTEST = 4  # what is shorter is no secret, and stands in many words


def hide(flat: argparse.Namespace) -> None:
    """Move the secrets in the flat arguments to the environment: wandb's key, and what authenticates in URLs.

    A user may write `${NAME}` in a URL, or WANDB_API_KEY as the key, and so keep the secret from the command line too.
    """
    value = vars(flat)
    key, urls = value["logger.wandb.key"], value["reward.remote_url"]
    if key and key != WANDB:
        os.environ[WANDB] = key
        value["logger.wandb.key"] = WANDB
    if urls:
        value["reward.remote_url"], secrets = divide(urls)
        os.environ.update(secrets)


def divide(urls: str) -> tuple[str, dict[str, str]]:
    """Return the URLs with the names of variables in place of what may be a secret, and the secrets by variable.

    The user, the password, each value of the query and each segment of the path may be one, except for `get_reward`
    and the names of this package's graders. What has a `${NAME}` stays as it is: a path, a value, or a password with
    its user.
    """
    secrets: dict[str, str] = {}
    parts = [_divide(url, f"{_REWARD}_{i}", secrets) for i, url in enumerate(_NEXT_URL.split(urls))]
    return ",".join(parts), secrets


def _divide(url: str, prefix: str, secrets: dict[str, str]) -> str:
    is_file = url in REWARDS or (url.endswith(".py") and "://" not in url)
    if is_file or not _IS_URL.match(url) or not (parts := _URL.match(url)):
        return url
    # A kept configuration has such names already.
    names = (name for i in itertools.count() if (name := f"{prefix}_{i}") not in url)

    def hidden(text: str) -> str:
        if text == "get_reward" or text in REWARDS or _NAME.search(text):
            return text
        secrets[name := next(names)] = text
        return f"${{{name}}}"

    user, path = parts["user"], parts["path"]
    if user and not _NAME.search(user.partition(":")[2]):
        user = _USER.sub(lambda part: hidden(part[0]), user)
    if not _NAME.search(path):
        path = _SEGMENT.sub(lambda part: hidden(part[0]), path)
    rest = _ARGUMENT.sub(lambda part: part["name"] + hidden(part["value"]), parts["rest"])
    at = "" if user is None else f"{user}@"
    return f"{parts['scheme'] or ''}{at}{parts['host']}{path}{rest}"


def collect(wandb_key: str | None, urls: list[str] | None) -> dict[str, str]:
    """Return the secrets that the arguments name, by variable."""
    names = [WANDB] if wandb_key else []
    names += _NAME.findall(",".join(urls or []))
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


def missing(url: str) -> list[str]:
    """Return the variables that the URL names and that have no value."""
    return [name for name in _NAME.findall(url) if not os.environ.get(name)]


def expand(url: str) -> str:
    """Return the URL with its secrets, for use and not for show. In the user and the password they are escaped."""
    user = re.match(r"\w[\w+.-]*://[^/?#]*@", url)
    end = user.end() if user else 0

    def text(match: re.Match) -> str:
        value = os.environ.get(match[1], "")
        return quote(value, safe="%") if match.end() < end else value

    return _NAME.sub(text, url)


def revealed(value: str | None) -> str | None:
    """Return the value of `--reward.remote_url` or a key with the variables that it names, for OpenRLHF itself.

    Raises:
        ValueError: a variable is not set.
    """
    if not value:
        return value
    value = f"${{{WANDB}}}" if value == WANDB else value
    if unset := missing(value):
        raise ValueError(f"{', '.join(unset)} is not set")
    return expand(value)


def mask(text: str, urls: str) -> str:
    """Return `text` with the names of the secrets of `urls` in place of the secrets, however they are escaped."""
    secrets = {os.environ.get(name, ""): name for name in _NAME.findall(urls)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) < _SHORTEST:
            break
        shown = f"${{{secrets[secret]}}}"
        text = shown.join(re.split("".join(map(_written, unquote(secret))), text))
    for user in re.findall(r"//([^/?#,]*)@", expand(urls)):  # as a header has it, which a server may repeat
        pair = unquote(user) if ":" in user else f"{unquote(user)}:"
        text = text.replace(base64.b64encode(pair.encode()).decode().rstrip("="), "${...}")
    return text


def _written(character: str) -> str:
    """Return a pattern for a character as itself, or as URLs, JSON and HTML escape it."""
    percent = "".join(f"%(?:25)*{byte:02X}" for byte in character.encode())
    ways = {character, html.escape(character), f"\\{character}", quote_plus(character)}
    return f"(?:{'|'.join(map(re.escape, sorted(ways)))}|(?i:{percent})|(?i:\\\\u{ord(character):04x}))"
