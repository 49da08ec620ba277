"""The documents name only what exists, and the citation and the changelog are of this version."""

import re
from pathlib import Path

import pytest
import yaml

import arlopti_openrlhf

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
FOLDERS = ("arlopti_openrlhf", "benchmarks", "docs", "examples", "requirements", "rewards", "study", "tests", r"\.ci")


def named_paths(text: str) -> set[str]:
    """Return the paths that a text names: those below a folder of the repository, and files in code or links."""
    below = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*", text)
    files = re.findall(r"(?:`|\]\()([\w./-]+\.(?:py|md|sh|cff|toml|png|txt))(?:`|\))", text)
    return {path.rstrip("./") for path in (*below, *files)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    found = named_paths((ROOT / document).read_text("utf-8"))
    assert found
    # Within the package, a document may leave out the package's name.
    missing = [path for path in found if not any((base / path).exists() for base in (ROOT, ROOT / "arlopti_openrlhf"))]
    assert not missing, f"{document} names {', '.join(sorted(missing))}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_that_is_run_exists(document):
    modules = re.findall(r"python -m ((?:arlopti_openrlhf|study)[\w.]*\w)", (ROOT / document).read_text("utf-8"))
    missing = [name for name in modules if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    assert not missing, f"{document} runs {', '.join(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document):
    text = (ROOT / document).read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named = set(re.findall(r"(?:^|`|\d )make ([a-z]+)\b", text, re.M))
    assert named and named <= targets, f"{document} names make {', '.join(sorted(named - targets))}"


def test_contributing_names_the_constant_that_a_new_version_changes():
    [name, path] = re.search(
        r"Change `([A-Z]+)` in `([\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    ).groups()
    assert re.search(rf"^{name} = ", (ROOT / path).read_text("utf-8"), re.M)


def test_paths_are_found_where_they_are_named():
    text = "See `AGENTS.md`, [the study](docs/study.md), rewards/kk_reward.py. Not outputs/x.py or `lopti/low/...`."
    assert named_paths(text) == {"AGENTS.md", "docs/study.md", "rewards/kk_reward.py"}


def test_the_citation_is_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["version"] == arlopti_openrlhf.__version__ and citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert {"type", "title", "authors"} <= paper.keys() and paper["doi"].endswith("2505.12929")
    assert [author["family-names"] for author in paper["authors"]][0] == "Yang" and len(paper["authors"]) == 7


def test_the_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## \[(.+?)\]", text, re.M)[:2] == ["Unreleased", arlopti_openrlhf.__version__]
