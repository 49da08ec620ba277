"""The notebook runs the quickstart's stages, all of them and in their order, and keeps no output."""

import ast
import json
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import quickstart

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def calls(source: str) -> list[str]:
    """Return the names of the quickstart's functions that code calls, in order."""
    found = sorted((n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)), key=lambda node: node.lineno)
    names = [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in found]
    ours = {name for name, value in vars(quickstart).items() if "arlopti" in getattr(value, "__module__", "")}
    return [name for name in names if name in ours]


def test_its_cells_are_the_stages_of_the_quickstart():
    run = next(
        node
        for node in ast.parse(Path(quickstart.__file__).read_text("utf-8")).body
        if vars(node).get("name") == "run"
    )
    stages = [name for name in calls(ast.unparse(run)) if name not in ("PeakMemory", "read_scalars")]
    mine = [name for name in calls("\n".join(CODE)) if name not in ("Plan", "training_flags", "read_scalars")]
    assert mine == stages and len(stages) == 6
    assert all(
        not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if cell["cell_type"] == "code"
    )


@pytest.mark.long
@pytest.mark.whole_stack
@pytest.mark.timeout(1200)
def test_its_cells_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for source in CODE:
        exec(compile(source.replace("task.full", "task.reduced"), str(NOTEBOOK), "exec"), names)
    assert names["plan"].size == names["task"].reduced
    said = capsys.readouterr().out
    assert "arlopti train --algo.ar.alpha 0.3 --algo.lopti.eta 0.5" in said
    assert (tmp_path / "outputs/notebook/curves.png").read_bytes().startswith(b"\x89PNG")
    assert [round(accuracy["all"]["n"]) for accuracy in names["accuracies"]] == [16, 16]
