"""Names the code that a model brings along, before anything loads the model and so runs it.

A model's configuration and its tokenizer's may name Python files (`auto_map`). OpenRLHF loads its models with
`trust_remote_code=True`, so transformers and vLLM run them.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.model import local_folder, read_json


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield the code of the run's models. It is fatal with --train.no_remote_code, and so is what cannot be known."""
    is_forbidden, seen = args.train.no_remote_code, set()
    for part in ("actor", "critic", "reward"):
        flag, model = f"--{part}.model_name_or_path", getattr(args, part).model_name_or_path
        if not model or model in seen or (part == "reward" and args.reward.remote_url):
            continue
        seen.add(model)
        folder = local_folder(model)
        if folder is None:
            if is_forbidden:
                problem = "it is not on this machine, so what code it brings is not known (--train.no_remote_code)"
                yield Finding(flag, model, problem, "download it first")
        elif code := code_of(folder):
            remedy = "--train.no_remote_code forbids that" if is_forbidden else "--train.no_remote_code refuses it"
            yield Finding(
                flag, model, f"it brings code, which runs when it is loaded: {', '.join(code)}", remedy, is_forbidden
            )


def code_of(folder: Path) -> list[str]:
    """Return the Python files that loading a model runs, as `repository--file` if they come from another one."""
    names = set()
    for path in folder.glob("*.json"):
        try:
            names |= set(_named(read_json(path)))
        except ValueError:  # another check says so
            continue
    return sorted(names)


def _named(value: Any, is_map: bool = False) -> Iterator[str]:
    """Yield the files that `auto_map` names anywhere in a file: each "module.Class", or a list of those."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _named(inner, is_map or key == "auto_map")
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner, is_map)
    elif is_map and isinstance(value, str):
        yield f"{value.rpartition('.')[0]}.py"
