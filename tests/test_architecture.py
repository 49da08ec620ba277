"""docs/architecture.md names only files and functions that exist, and its picture shows the rooms that there are."""

import ast
import re
from pathlib import Path

import pytest

from arlopti_openrlhf import bindings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "arlopti_openrlhf"
TEXT = (ROOT / "docs/architecture.md").read_text("utf-8")
PICTURE = (ROOT / "docs/architecture.svg").read_text("utf-8")


def steps() -> list[tuple[str, str]]:
    """Return each (file, function) of the tables' rows."""
    rows = [line.strip("|").split("|") for line in TEXT.splitlines() if line.count("|") == 4 and ".py`" in line]
    pairs = [(re.findall(r"`([\w/]+\.py)`", row[1]), re.findall(r"`([\w.]+)`", row[2])) for row in rows]
    return [(file, name) for files, names in pairs for file in files for name in names]


def test_every_step_names_its_file_and_function():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and line.count("|") == 4]
    tables = sum(line.startswith("| step |") for line in rows)
    assert tables == 2 and len(rows) - tables > 15
    assert all(
        re.search(r"`\S+\.py` \| `\w", line) or "`, `" in line for line in rows if not line.startswith("| step")
    )
    assert len(steps()) > 20


@pytest.mark.parametrize(("file", "name"), steps())
def test_exists(file, name):
    body = ast.parse((PACKAGE / file).read_text("utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = found[0].body


def test_every_other_path_exists():
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", TEXT):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


def rooms() -> set[str]:
    return {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize("shown", [TEXT, PICTURE], ids=["table", "picture"])
def test_every_room_is_shown(shown):
    assert {room for room in rooms() if f"{room}/" in shown} == rooms()


def table_of_bindings() -> list[str]:
    """Return the rows of `bindings` as the page shows them: one for all names that get the same."""
    rows = [(f"{row.module}.{row.name}", row.ours, row.needs, row.what_for) for row in bindings.TABLE]
    shown: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        shown.setdefault(tuple(rest), []).append(name.removeprefix("openrlhf.").removeprefix("trainer."))
    return [
        f"| {', '.join(f'`{name}`' for name in names if name)} | `{ours}` | {needs} | {what_for} |"
        for (ours, needs, what_for), names in shown.items()
    ]


def test_the_table_of_bindings_is_shown():
    start = "| OpenRLHF's name | ours | if the run has | what for |\n|---|---|---|---|\n"
    shown = TEXT.partition(start)[2].partition("\n\n")[0].splitlines()
    assert shown == table_of_bindings(), "\n".join(table_of_bindings())
