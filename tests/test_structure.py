"""The code keeps its shape: limits on length, no circle of imports, no hooks in the update, `rewards/` no package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "arlopti_openrlhf"
FILES = sorted(
    path
    for folder in (PACKAGE, *(ROOT / name for name in ("study", "benchmarks", "rewards")))
    for path in folder.rglob("*.py")
)
# The update is driven by one class.
LONGER = {"TokenUpdateTrainer": 255}
LIMITS = {ast.Module: 400, ast.ClassDef: 200, ast.FunctionDef: 90, ast.AsyncFunctionDef: 90}  # lines


def test_nothing_is_too_long():
    too_long = []
    for path in FILES:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if type(node) is ast.Module:
                name, length = "file", len(text.splitlines())
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name, length = node.name, node.end_lineno - node.lineno + 1
            else:
                continue
            limit = LONGER.get(name, LIMITS[type(node)])
            if length > limit:
                too_long.append(f"{path.relative_to(ROOT)}: {name} has {length} lines, at most {limit}")
    assert not too_long, "\n".join(too_long)


def imports() -> dict[str, set[str]]:
    """Return {module of the package: the package's modules that it imports, also inside functions}."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules = set(names.values())
    return {name: set(_imported(path, modules)) & modules - {name} for path, name in names.items()}


def _imported(path: Path, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import, which this test does not follow"
            of_names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from of_names & modules
            if of_names - modules:  # something that the module itself defines
                yield node.module


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return modules that import each other in a circle, the first again at the end; None where there is none."""
    clear: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in clear:
            return None
        for imported in sorted(graph[module]):
            if circle := visit(imported, [*path, module]):
                return circle
        clear.add(module)
        return None

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), None)


def test_no_circle_of_imports():
    graph = imports()
    assert graph["arlopti_openrlhf.lab.scoring.tables"] == {
        "arlopti_openrlhf.evaluation.measures",
        "arlopti_openrlhf.lab.scoring.inputs",
    }
    circle = find_circle(graph)
    assert circle is None, " imports ".join(circle)


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, None),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
)
def test_a_circle_is_found_where_there_is_one(graph, circle):
    assert find_circle(graph) == circle


def test_rewards_is_no_package():
    """A package of that name would hide, or be hidden by, a folder `rewards/` where the user trains."""
    assert sorted(path.name for path in (ROOT / "rewards").glob("*.py")) == ["kk_reward.py", "math_reward.py"]


def test_the_update_registers_no_hook():
    """What happens to a token stands in the step, in order, not in hooks of a model, a loss or an engine."""
    assert not [path for path in (PACKAGE / "update").rglob("*.py") if "register_forward" in path.read_text("utf-8")]
