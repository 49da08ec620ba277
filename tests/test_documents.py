"""The documents name only what exists, their links resolve, and the citation and the changelog are of this version."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import arlopti_openrlhf

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", *PAGES)
LINKED = (*DOCUMENTS, "CHANGELOG.md", "benchmarks/README.md")
FOLDERS = ("arlopti_openrlhf", "benchmarks", "docs", "examples", "requirements", "rewards", "study", "tests", r"\.ci")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def named_paths(text: str) -> set[str]:
    """Return the paths that a text names: those below a folder of the repository, and files in code or links."""
    below = re.findall(rf"(?<![\w/.:-])(?:{'|'.join(FOLDERS)})/[\w./-]*", text)
    files = re.findall(r"(?:`|\]\()([\w./-]+\.(?:py|md|sh|cff|toml|png|txt))(?:`|\))", text)
    return {path.rstrip("./") for path in (*below, *files)}


def anchors(text: str) -> set[str]:
    """Return the anchors of a text's headings."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", without_code, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    yours = {"my_reward.py", "my_agent.py", "mine.py", "my_run.yaml"}
    found = named_paths(text_of(document)) - yours
    # Within the package, a document may leave out the package's name, and a launch script is known by its own. Links
    # lead from where they stand.
    bases = (ROOT, ROOT / "arlopti_openrlhf", ROOT / "examples/scripts", (ROOT / document).parent)
    missing = [path for path in found if not any((base / path).exists() for base in bases)]
    assert not missing, f"{document} names {', '.join(sorted(missing))}"


@pytest.mark.parametrize("document", LINKED)
def test_every_link_resolves(document):
    text = re.sub(r"^```.*?^```|`[^`]*`", "", text_of(document), flags=re.M | re.S)
    links = re.findall(r"\]\((?!\w+:|\.\./\.\./actions/)([^)\s]+)\)", text)  # GitHub has the page of actions
    for path, _, anchor in (link.partition("#") for link in links):
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document} links to {path}"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{document} links to {path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_that_is_run_exists(document):
    modules = re.findall(r"python -m ((?:arlopti_openrlhf|study)[\w.]*\w)", text_of(document))
    missing = [name for name in modules if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    assert not missing, f"{document} runs {', '.join(missing)}"


def test_every_launch_script_is_in_the_guide():
    scripts = {path.name for path in (ROOT / "examples/scripts").glob("*.sh")} - {"paper_settings.sh"}
    assert scripts <= named_paths(text_of("docs/getting_started.md")), "docs/getting_started.md"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document):
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.M))
    named = set(re.findall(r"(?:^|`|\d )make ([a-z]+)\b", text_of(document), re.M))
    assert named <= targets, f"{document} names make {', '.join(sorted(named - targets))}"


def test_contributing_names_the_constant_that_a_new_version_changes():
    [name, path] = re.search(r"Change `([A-Z]+)` in `([\w/.]+)`", text_of("CONTRIBUTING.md")).groups()
    assert re.search(rf"^{name} = ", text_of(path), re.M)


def test_the_citation_is_valid_and_of_this_version():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["version"] == arlopti_openrlhf.__version__ and citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert {"type", "title", "authors"} <= paper.keys() and paper["doi"].endswith("2505.12929")
    assert [author["family-names"] for author in paper["authors"]][0] == "Yang" and len(paper["authors"]) == 7


def test_the_packages_metadata_are_the_citations():
    command = [sys.executable, "setup.py", "--author", "--version", "--license", "--url", "--classifiers"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert said[:3] == [citation["authors"][0]["name"], citation["version"], citation["license"]]
    assert "Typing :: Typed" in said and said[3] == "https://github.com/OWNER/arlopti_openrlhf"  # there is no URL yet


def test_a_package_index_gets_absolute_links():
    """A workflow's are those of its repository."""
    own = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "we/it"}
    command = [sys.executable, "setup.py", "--long-description"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=True)
    links = re.findall(r"\]\(([^)\s]+)\)", done.stdout)
    assert len(links) > 20 and all(re.match("https://|#", link) for link in links)
    prefix = "https://git.example/we/it"
    assert {f"{prefix}/raw/main/docs/methods.svg", f"{prefix}/blob/main/docs/flags.md"} <= {*links}


def test_the_changelog_has_this_version():
    assert re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.M)[:2] == [
        "Unreleased",
        arlopti_openrlhf.__version__,
    ]
