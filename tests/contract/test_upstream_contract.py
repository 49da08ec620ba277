"""What we depend on in OpenRLHF, DeepSpeed, vLLM, Ray, PyTorch and transformers is as it was.

To add an entry, choose the table and the kind (`kinds`). `python -m pytest tests/contract -k NAME` tests it.
"""

import ast
import importlib.metadata
from pathlib import Path

import pytest
from contract import kinds
from contract.newest import CONTRACT, difference

from arlopti_openrlhf.upstream import find_source


def case_id(entry: tuple) -> str:
    _, module, name, expected, _ = entry
    return f"{'.'.join(filter(None, (module, name)))}:{kinds.squeeze(expected)[:40]}"


@pytest.mark.parametrize("entry", CONTRACT, ids=case_id)
def test_upstream_is_as_it_was(entry):
    path = find_source(entry[1])
    if line := difference(entry, path.read_text("utf-8") if path.is_file() else None):
        pytest.fail(line, pytrace=False)


def test_no_entry_is_there_twice():
    assert len({entry[:-1] for entry in CONTRACT}) == len(CONTRACT)


def our_names() -> list[str]:
    """Return the names of ours that depend on something, without what is said after a colon."""
    return sorted({name.strip() for *_, who in CONTRACT for name in who.partition(":")[0].split(",")})


@pytest.mark.parametrize("name", our_names())
def test_what_depends_on_upstream_exists(name):
    """Each name is a module of ours, or a class, function or constant in one."""
    parts = name.split(".")
    root = Path(__file__).parents[2] / "arlopti_openrlhf"
    modules = [n for n in range(1, len(parts) + 1) if root.joinpath(*parts[:n]).with_suffix(".py").is_file()]
    packages = [n for n in range(1, len(parts) + 1) if root.joinpath(*parts[:n], "__init__.py").is_file()]
    assert modules or packages, f"{name} names no module"
    end = modules[0] if modules else packages[-1]
    file = root.joinpath(*parts[:end]).with_suffix(".py") if modules else root.joinpath(*parts[:end], "__init__.py")
    body = ast.parse(file.read_text("utf-8")).body
    for part in parts[end:]:
        found = [n for n in body if getattr(n, "name", None) == part or part in map(ast.unparse, targets_of(n))]
        assert found, f"{name}: there is no {part}"
        body = getattr(found[0], "body", [])


def targets_of(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else []


def test_vllm_loads_our_plugin_in_its_engine_process():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "arlopti_openrlhf.cpu:enable_in_vllm" in {point.value for point in points}, (
        "reinstall the project: make setup"
    )


SOURCE = """
class Trainer:
    name: str
    step: int = 0

    async def fit(self, steps, *, resume=False, **kwargs):
        '''Trains.'''
        # a comment
        return   [steps,
                  resume]

def fit(self): pass
"""


@pytest.mark.parametrize(
    ("old", "new", "differ"),
    [
        ("", "", []),
        ("steps, *,", "count, *,", [kinds.signature, kinds.body]),
        ("resume=False,", "resume=True,", [kinds.body]),
        ("return   [steps,", "return   [0, steps,", [kinds.text, kinds.body]),
        ("# a comment", "# another", [kinds.body]),
        ("step: int", "steps: int", [kinds.fields]),
        ("async def fit", "async def train", [kinds.signature, kinds.text, kinds.body]),
        ("class Trainer", "class BaseTrainer", [kinds.signature, kinds.text, kinds.body, kinds.fields]),
    ],
)
def test_what_differs_is_found_by_kind(old, new, differ):
    entries = (
        (kinds.signature, "Trainer.fit", "self steps *, resume **kwargs"),
        (kinds.text, "Trainer.fit", "return [ steps, … resume ]"),
        (kinds.body, "Trainer.fit", "1aaa4a575433e75d"),
        (kinds.fields, "Trainer", "name step"),
    )
    found = [kind for kind, *rest in entries if difference((kind, "trainer", *rest, ""), SOURCE.replace(old, new))]
    assert found == differ


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ("host, port, name=None", ""),
        ("host, port, name=None, timeout=30", ""),
        ("host, port, name, timeout=30", "m.f: takes (host port name …), not (host port …). Who depends on it: ours"),
        ("port, host", "m.f: takes (port host …), not (host port …). Who depends on it: ours"),
    ],
)
def test_a_function_that_we_call_may_get_more_parameters_with_defaults(parameters, line):
    assert difference((kinds.signature, "m", "f", "host port …", "ours"), f"def f({parameters}): pass") == line
