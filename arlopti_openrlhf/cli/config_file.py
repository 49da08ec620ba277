"""Flags in a YAML file: `--config run.yaml`. What the command line gives counts before what the file gives.

The file names flags without their dashes. Parts of a name may be nested:

    actor:
      model_name_or_path: Qwen/Qwen2.5-3B-Instruct
      adam.lr: 1e-6
    algo.ar.alpha: 0.3
    ds.packing_samples: true
    actor.eps_clip_low_high: [0.2, 0.24]

A run keeps the values of all its flags in such a file, by topic, next to its checkpoints, with absolute paths.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.cli import flags
from arlopti_openrlhf.cli.bad_input import Parser
from arlopti_openrlhf.ops.checkpoints.files import KEPT, flags_of, newest_of, saved_in, write

_SWITCHES = {"true": True, "false": False}


def expanded(argv: Sequence[str], parser: Parser) -> list[str]:
    """Return the words of the command line with those of the file that --config names before them.

    If a flag may be given several times, as --eval.sampling, the values of both count.

    Raises:
        SystemExit: by the parser, with one line that names the file and the key, for a file that cannot be read, an
            unknown key, or a value that is not of the flag's form.
    """
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument(flags.CONFIG)
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return list(argv)
    try:
        entries = read(Path(path).read_text("utf-8"))
        return [word for key, value in entries.items() for word in _words(key, value, parser)] + list(argv)
    except (OSError, ValueError) as error:
        parser.error(f"argument {flags.CONFIG}: {path}: {error}")


def keep(flat: argparse.Namespace, folder: Path) -> None:
    """Write the values of all flags to a file in `folder`, which is made. --config and only this user can read it."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / KEPT, text(flat))


def of_resumed(args: SimpleNamespace) -> dict[str, Any]:
    """Return the flags of the start that wrote the newest checkpoint of the run that is resumed, by name, or nothing.

    Its file in --ckpt.path may be another by now: a user edits it, and each start writes it.

    Raises:
        OSError, ValueError, TypeError: its file cannot be read.
    """
    folder = Path(args.ckpt.path)
    if not (args.ckpt.load_enable and saved_in(folder)):
        return {}
    newest = newest_of(args)
    return read((newest and flags_of(newest)) or (folder / KEPT).read_text("utf-8"))


def text(flat: argparse.Namespace) -> str:
    """Return the content of such a file: absolute paths, and no flags without a value or for one start alone."""
    import yaml

    once = ("config", "ckpt.load_changed")
    given = {key: _plain(value) for key, value in vars(flat).items() if value is not None and key not in once}
    by_topic: dict[str, Any] = {}  # {"actor": {"adam.lr": 1e-6}, "dry_run": False}
    for key, value in given.items():
        topic, _, name = key.partition(".")
        inside = by_topic.setdefault(topic, {}) if name else by_topic
        inside[name or topic] = flags.absolute(key, value)
    return yaml.safe_dump(by_topic, sort_keys=True, allow_unicode=True)


def read(text: str) -> dict[str, Any]:
    """Return the values in a file by the names of their flags, such as "actor.adam.lr", however they are nested.

    All values stay text: the parser knows each flag's type, and `off` is no bool.

    Raises:
        ValueError: it is no YAML, names no flags, or names one twice.
    """
    import yaml

    try:
        content, node = yaml.load(text, Loader=yaml.BaseLoader), yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError("holds no names of flags with values")
    pairs = list(_flat(content))
    names = [name for name, _ in pairs]
    # PyYAML takes the last of two blocks and drops the first, with all flags in it.
    for name in (*_repeated(node), *(name for i, name in enumerate(names) if name in names[:i])):
        raise ValueError(f"{name} is there twice")
    return dict(pairs)


def _repeated(node: Any, before: str = "") -> Iterator[str]:
    """Yield the names that a mapping of YAML, or one inside it, has more than once."""
    if node.id != "mapping":
        return
    names = [f"{before}{name.value}" for name, _ in node.value]
    yield from (name for i, name in enumerate(names) if name in names[:i])
    for name, (_, inside) in zip(names, node.value, strict=True):
        yield from _repeated(inside, f"{name}.")


def _flat(content: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names of flags, with their values, of nested and dotted names alike."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _words(key: str, value: Any, parser: Parser) -> list[str]:
    """Return the words of the command line that stand for one entry.

    Raises:
        ValueError: the key or the value's form is no flag's.
    """
    actions = {action.dest: action for action in parser._actions}
    action = actions.get(key)
    if action is None or key in ("help", "config"):
        hint = parser.hint(f"--{key}")
        raise ValueError(f"{key} is no flag" + (f"; {hint}" if hint else ""))
    flag, values = action.option_strings[0], value if isinstance(value, list) else [value]
    if action.nargs == 0:
        if isinstance(value, list) or value not in _SWITCHES:
            raise ValueError(f"{key}: {value} is neither true nor false")
        # What is false by default needs no word for it.
        return [a.option_strings[0] for a in parser._actions if a.dest == key and a.const is _SWITCHES[value]][:1]
    if value in ("null", "", action.default):
        return []
    if any(not isinstance(part, str) for part in values):
        raise ValueError(f"{key}: is no list of plain values")
    if action.nargs is not None:
        return [flag, *values]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise ValueError(f"{key}: takes one value, not a list")
    return [f"{flag}={part}" for part in values]


def _plain(value: Any) -> Any:
    """Return a value as YAML has it, and as its flag reads it. YAML's infinity is not Python's."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain(part) for part in value]
    return str(value)
