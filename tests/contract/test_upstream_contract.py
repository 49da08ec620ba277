"""What we lean on in OpenRLHF, DeepSpeed, vLLM, Ray, PyTorch and transformers is where it was.

The table is the package's own (`preflight.seams`, which says how to add an entry). A failure says what moved upstream
and what of ours leans on it: read the new code there, adapt ours, then the table.
"""

import ast
import importlib.metadata
from pathlib import Path

import pytest

from arlopti_openrlhf.ops.preflight.seams import grading
from arlopti_openrlhf.ops.preflight.seams.check import ALWAYS, PATCHED
from arlopti_openrlhf.ops.preflight.seams.kinds import Moved, Seam, Source, squeeze

SEAMS = (*ALWAYS, *PATCHED, *grading.SEAMS)
SOURCE = Source()


def case_id(seam: Seam) -> str:
    return f"{seam}:{squeeze(seam.expected)[:40]}"


@pytest.mark.parametrize("seam", SEAMS, ids=case_id)
def test_seam(seam):
    try:
        seam.check(SOURCE)
    except Moved as moved:
        pytest.fail(str(moved))


def test_no_entry_is_there_twice():
    assert len(set(SEAMS)) == len(SEAMS)


def leaning_names() -> list[str]:
    """Return the names of ours that lean on something, without what is said after a colon."""
    return sorted({name.strip() for seam in SEAMS for name in seam.leans.partition(":")[0].split(",")})


@pytest.mark.parametrize("name", leaning_names())
def test_what_leans_on_upstream_exists(name):
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
