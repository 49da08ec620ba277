"""Reads OpenRLHF's command line from its source, without importing OpenRLHF.

Upstream builds its parser, and checks what it has parsed, under `if __name__ == "__main__"`. The module imports Ray,
vLLM and DeepSpeed first, which takes half a minute. Here the statements of that block run alone.
"""

import argparse
import ast
import copy
import functools
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from arlopti_openrlhf.cli import bad_input, config_file, flags, help
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.upstream import find_source

_COMMAND = "openrlhf.cli.train_ppo_ray"
_CONFIG = "openrlhf.utils.config"
_REWARDS = ("reward.model_name_or_path", "reward.remote_url", "train.agent_func_path")
_NO_REWARD = Finding("--reward.remote_url", None, "there is no source of rewards", f"give --{' or --'.join(_REWARDS)}")


class _Parser(bad_input.Parser):
    """Stands for `ArgumentParser` in upstream's statements, which parse nothing yet."""

    def parse_args(self, args=None, namespace=None):
        return self


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what upstream's parser makes of `argv`, with our flags in it, as a flat namespace.

    Raises:
        SystemExit: with status 2 after one line on standard error, for a flag or a value that is refused, and with
            status 0 after the help.
    """
    parser = make_parser()
    return bad_input.Parser.parse_args(parser, config_file.expanded(argv, parser))


def make_parser() -> bad_input.Parser:
    """Return upstream's parser with our flags in it. It reads no file of flags; `parse` does."""
    block = _block()
    names = block.names | {"argparse": SimpleNamespace(**vars(argparse) | {"ArgumentParser": _Parser})}
    for statement in block.parsing:
        _execute(statement, block.path, names)
    parser = names["args"]
    parser.prog = "arlopti train"
    flags.add(parser)
    help.arrange(parser)
    return parser


class Checked(NamedTuple):
    """What upstream's `train` would be called with, and what upstream's own checks say against it."""

    args: SimpleNamespace
    findings: list[Finding]


def check(flat: argparse.Namespace) -> Checked:
    """Nest the arguments, fill in what follows from others, and check them, all as upstream does after parsing.

    Each of upstream's statements runs, also after one that fails. So all that it would refuse is found at once.
    """
    block = _block()
    names = block.names | {"args": copy.deepcopy(flat), "train": lambda args: None}
    findings = [] if any(vars(flat)[name] for name in _REWARDS) else [_NO_REWARD]
    for statement in block.checking:
        if isinstance(statement, ast.ImportFrom) and statement.module == _CONFIG:
            names["hierarchize"] = hierarchize
            continue
        try:
            _execute(statement, block.path, names)
        except Exception as error:
            if isinstance(error, AttributeError) and _NO_REWARD in findings:  # of a reward model that is not there
                continue
            findings.append(_finding(statement, error, block.path, vars(flat)))
    return Checked(names["args"], findings)


def hierarchize(flat: argparse.Namespace) -> SimpleNamespace:
    """Return upstream's nested form of the arguments: `--algo.ar.alpha` is `args.algo.ar.alpha`."""
    names: dict[str, Any] = {}
    path = find_source(_CONFIG)
    exec(compile(path.read_text("utf-8"), path, "exec"), names)  # noqa: S102
    return names["hierarchize"](flat)


class _Block(NamedTuple):
    """The statements of upstream's `if __name__ == "__main__"`."""

    path: str
    names: dict[str, Any]  # what the module imports from the standard library
    parsing: list[ast.stmt]  # up to `args = parser.parse_args()`
    checking: list[ast.stmt]  # after it


@functools.cache
def _block() -> _Block:
    path = str(find_source(_COMMAND))
    names: dict[str, Any] = {}
    block: list[ast.stmt] = []
    for statement in ast.parse(Path(path).read_text("utf-8")).body:
        if _is_of_standard_library(statement):
            _execute(statement, path, names)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            block = statement.body
    [parsed] = [i for i, statement in enumerate(block) if ast.unparse(statement) == "args = parser.parse_args()"]
    return _Block(path, names, block[: parsed + 1], block[parsed + 1 :])


def _is_of_standard_library(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in statement.names)
    return isinstance(statement, ast.ImportFrom) and (statement.module or "") in sys.stdlib_module_names


def _execute(statement: ast.stmt, path: str, names: dict[str, Any]) -> None:
    exec(compile(ast.Module([statement], []), path, "exec"), names)  # noqa: S102


def _finding(statement: ast.stmt, error: Exception, path: str, flat: dict[str, Any]) -> Finding:
    """Return what failed, with the flags that the failing line reads."""
    line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path][-1] or 0
    innermost = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ][-1]
    read = innermost.value if isinstance(innermost, ast.Assign) else innermost
    nodes = [node for node in ast.walk(read) if isinstance(node, ast.Attribute)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [ast.unparse(node).removeprefix("args.") for node in nodes]
    flag, *others = dict.fromkeys(name for name in names if name in flat) or [""]
    problem = str(error).rstrip(".") if isinstance(error, AssertionError) else f"OpenRLHF's own check fails: {error!r}"
    remedy = " or ".join(["change it", *(f"--{name} {flat[name]}" for name in others)])
    return Finding(f"--{flag}" if flag else "", flat.get(flag, ""), problem, remedy)
