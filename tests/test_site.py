"""The site shows every page, names no page that is not there, and asks nothing of the network."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
PYTHON = ROOT / ".venv-docs/bin/python"


def module_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks():
    return module_of_docs("hooks")


def entries(nav: list | dict, title: str = "") -> Iterator[tuple[str, str]]:
    """Yield (title, page) of each entry of the navigation."""
    if isinstance(nav, str):
        yield title, nav
    else:
        for name, part in [pair for entry in nav for pair in entry.items()]:
            yield from entries(part, name)


def test_every_page_is_in_the_navigation_once(hooks):
    pages = [page for _, page in entries(CONFIG["nav"])]
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) == len(set(pages)) and set(pages) == docs | set(hooks.PAGES.values())
    assert all((ROOT / file).exists() for file in hooks.PAGES) and not docs & set(hooks.PAGES.values())


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("docs/flags.md", "index.md", "flags.md"),  # from README.md
        ("CONTRIBUTING.md", "index.md", "contributing.md"),
        ("CHANGELOG.md", "index.md", "changelog.md"),
        ("../CHANGELOG.md", "costs.md", "changelog.md"),
        ("../rewards.md", "api/rewards.md", "../rewards.md"),
        ("docs/study.png", "index.md", "study.png"),
        ("../study/results/family_accuracy.csv", "results.md", "family_accuracy.csv"),
        ("../setup.py", "results.md", "../setup.py"),  # leaves the site: a strict build refuses it
    ],
)
def test_links_between_the_repository_and_the_site(hooks, link, page, expected):
    assert hooks.page_link(link, page) == expected


def test_links_alone_are_rewritten(hooks):
    text = "[a](docs/flags.md#x) [b](https://x.org/docs/y.md) [c](#here) ![d](docs/quickstart.png) `docs/flags.md`"
    page = type("Page", (), {"file": type("File", (), {"src_uri": "index.md"})})
    assert hooks.on_page_markdown(text, page, None, None) == (
        "[a](flags.md#x) [b](https://x.org/docs/y.md) [c](#here) ![d](quickstart.png) `docs/flags.md`"
    )
    badge = "It passed: [![nightly](../../actions/n.yml/badge.svg)](../../actions/n.yml)"
    assert hooks.on_page_markdown(f"a\n\n{badge}\n\nb\n", page, None, None) == "a\n\nb\n"


def test_the_drawings_are_what_their_script_draws():
    drawings = module_of_docs("drawings")
    for name in ("methods", "update"):
        assert (ROOT / f"docs/{name}.svg").read_text("utf-8") == getattr(drawings, name)(), "python docs/drawings.py"


def test_a_tree_of_files_keeps_its_depth_and_its_code(hooks):
    assert hooks.tree("a/\n  b.py   does `c` & d\n").splitlines() == [
        '<div class="tree">',
        '<code style="margin-left: 0ch">a/</code><span></span>',
        '<code style="margin-left: 2ch">b.py</code><span>does <code>c</code> &amp; d</span>',
        "</div>",
    ]


def test_what_builds_the_site_is_pinned():
    lines = (ROOT / "requirements/docs.txt").read_text("utf-8").splitlines()
    packages = [line.partition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(packages) > 20
    assert {"mkdocs-material", "mkdocstrings-python", "ruff"} <= {line.split("==")[0] for line in packages}
    lock = (ROOT / "requirements/lock.txt").read_text("utf-8")
    [ruff] = [line for line in packages if line.startswith("ruff==")]
    assert f"\n{ruff} " in lock  # two versions would write signatures differently


class Loaded(HTMLParser):
    """Collects what a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "link") and given.get("rel") != "canonical":
            self.addresses += [value for name, value in attrs if name in ("src", "href") and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if not PYTHON.exists():
        pytest.skip("make docs has not installed what builds the site")
    site = tmp_path_factory.mktemp("site")
    command = [str(PYTHON), "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return site


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(list(entries(CONFIG["nav"])))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text("utf-8"))
        assert loaded.addresses
        assert not [address for address in loaded.addresses if address.startswith(("http:", "https:", "//"))], page


def test_the_home_page_has_cards_for_the_table_of_links(site):
    page = (site / "index.html").read_text("utf-8")
    [cards] = re.findall(r'<div class="grid cards">(.*?)</div>', page, re.S)
    rows = re.findall(r"^\| .* \| \[.*\.md\).* \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert cards.count("<li>") == len(rows) > 10 and 'href="getting_started.html"' in cards
    assert "you want to</th>" not in page


def test_the_api_has_the_public_functions(site):
    assert "advantage_weights" in (site / "api/token_update.html").read_text("utf-8")
    assert "reward_func" in (site / "api/rewards.html").read_text("utf-8")


def test_a_pages_title_is_the_navigations(hooks):
    sources = {page: ROOT / file for file, page in hooks.PAGES.items()}
    for title, page in entries(CONFIG["nav"]):
        text = sources.get(page, ROOT / "docs" / page).read_text("utf-8")
        assert page == "index.md" or text.startswith(f"# {title}\n"), page
