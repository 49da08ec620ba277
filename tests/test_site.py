"""The site shows every page, names no page that is not there, and asks nothing of the network."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import yaml
from arlopti_testing import browser

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


def test_the_home_page_begins_with_the_drawings():
    readme = (ROOT / "README.md").read_text("utf-8")
    pictures = re.findall(r"^!\[[^\]]+\]\((\S+)\)", readme, re.M)
    assert pictures == ["docs/methods.svg", "docs/update.svg"]
    assert readme.index(pictures[-1]) < readme.index("## Two commands")


def test_a_tree_of_files_keeps_its_depth_and_its_code(hooks):
    assert hooks.tree("a/\n  b.py   does `c` & d\n").splitlines() == [
        '<div class="tree">',
        '<code style="margin-left: 0ch">a/</code><span></span>',
        '<code style="margin-left: 2ch">b.py</code><span>does <code>c</code> &amp; d</span>',
        "</div>",
    ]


def test_the_cells_of_a_table_know_their_column(hooks):
    shown = (
        "<table><thead><tr><th>flag</th><th></th></tr></thead><tr><td><code>--a 1</code></td><td>b</td></tr></table>"
    )
    assert hooks.on_page_content(shown, None, None, None).split("</thead>")[1] == (
        '<tr><td data-label="flag"><code><span>--a</span> <span>1</span></code></td><td>b</td></tr></table>'
    )


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


SEARCH = """new Promise(resolve => {
  document.querySelector("#__search").click()
  const input = document.querySelector(".md-search__input")
  const ask = query => { input.value = query; input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true})) }
  const said = () => document.querySelector(".md-search-result__meta").innerText
  const address = link => new URL(link.href).pathname
  const found = () => [...document.querySelectorAll(".md-search-result__item > a")].map(address)
  input.dispatchEvent(new FocusEvent("focus"))
  ask("")
  const looking = setInterval(() => {
    if (!input.value) { if (/^Type/.test(said())) ask("QUERY") }
    else if (found().length || /^No match/.test(said())) { clearInterval(looking); resolve(found()) }
  }, 50)
})"""


@pytest.fixture(scope="module", params=["disk", "server"])
def address(request, site) -> Iterator[str]:
    """Return where the site is. From the disk, its search runs in a frame in place of a Worker."""
    if request.param == "disk":
        yield site.as_uri()
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
def test_the_search_finds_flags_as_one_types_them(address, tmp_path):
    flags = ("--algo.lopti.eta", "algo.lopti.eta", "lopti.eta", "--algo.lop", "--algo.lopti.eta=0.5", "--dry-run")
    with browser.chromium(tmp_path) as page:
        page.open(f"{address}/index.html", 1280, dark=False)

        def found(query: str) -> list[str]:  # a page is there once for each of its sections that is shown
            return list(dict.fromkeys(Path(link).name for link in page.evaluate(SEARCH.replace("QUERY", query))))

        for flag in flags:
            assert "flags.html" in found(flag)[:2], flag
        assert "long_runs.html" in found("--ckpt.load_enable")
        assert found("write a token method")[0] == "token_methods.html"
        assert found("--algo.lopti.zeta") == []


# The first words of the blocks of code that are wider than their frame. Those that are folded up are opened.
CUT_BLOCKS = """(() => {
  document.querySelectorAll("details").forEach(folded => folded.open = true)
  return [...document.querySelectorAll("pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth).map(code => code.innerText.slice(0, 50))
})()"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_no_block_of_code_is_cut(site, width, tmp_path):
    with browser.chromium(tmp_path) as page:
        for name in [Path(name).with_suffix(".html") for _, name in entries(CONFIG["nav"])]:
            page.open(site / name, width, dark=False)
            assert page.evaluate(CUT_BLOCKS) == [], name
            assert name.stem != "rewards" or page.evaluate("document.querySelectorAll('pre > code').length") > 3


# Of each table that is wider than its frame: whether the first column stays where it is when the rest scrolls.
FIRST_COLUMNS = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
  .filter(frame => frame.scrollWidth > frame.clientWidth)
  .map(frame => {
    const cell = frame.querySelector("td"), before = cell.getBoundingClientRect().left
    frame.scrollLeft = 1000
    return frame.scrollLeft > 0 && Math.abs(cell.getBoundingClientRect().left - before) < 20
  })"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_from_the_disk(site, width, tmp_path):
    """A wide table may scroll inside its frame, under its first column, but never the page."""
    with browser.chromium(tmp_path) as page:
        names = "index flags results costs comparison architecture troubleshooting api/methods"
        for name in names.split():
            page.open(site / f"{name}.html", width, dark=False)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("document.querySelector('h1').innerText")
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            assert page.evaluate(broken) == []
            tables = page.evaluate(FIRST_COLUMNS)
            assert all(stays for stays in tables) and (name != "comparison" or tables), name
        elsewhere = [request for request in page.requests if not request.startswith(("file:", "data:", "blob:"))]
        assert not elsewhere
