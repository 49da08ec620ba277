"""The site shows every page, names no page that is not there, and asks nothing of the network."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from arlopti_testing import browser

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
PYTHON = ROOT / ".venv-docs/bin/python"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: list | dict | str) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_every_page_is_in_the_navigation_once(hooks):
    pages = list(pages_of(CONFIG["nav"]))
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) == len(set(pages)) and set(pages) == docs | set(hooks.PAGES.values())
    assert all((ROOT / file).exists() for file in hooks.PAGES) and not docs & set(hooks.PAGES.values())


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("docs/flags.md", "index.md", "flags.md"),  # from README.md
        ("CONTRIBUTING.md", "index.md", "contributing.md"),
        ("benchmarks/README.md", "index.md", "benchmarks.md"),
        ("../benchmarks/README.md", "costs.md", "benchmarks.md"),
        ("../rewards.md", "api/rewards.md", "../rewards.md"),
        ("../docs/study.png", "benchmarks.md", "study.png"),
        ("../study/results/family_noise_accuracy.csv", "study_family.md", "family_noise_accuracy.csv"),
        ("../study/runs.py", "study.md", "../study/runs.py"),  # leaves the site: a strict build refuses it
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


def test_what_builds_the_site_is_pinned():
    lines = (ROOT / "requirements/docs.txt").read_text("utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert len(packages) > 20 and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in packages)
    assert {"mkdocs-material", "mkdocstrings-python", "ruff"} <= {line.split("==")[0] for line in packages}
    lock = (ROOT / "requirements/lock.txt").read_text("utf-8")
    [ruff] = [line for line in packages if line.startswith("ruff==")]
    assert f"\n{ruff}\n" in lock  # two versions would write signatures differently


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
    assert len(pages) >= len(list(pages_of(CONFIG["nav"])))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text("utf-8"))
        assert loaded.addresses
        assert not [address for address in loaded.addresses if address.startswith(("http:", "https:", "//"))], page


def test_the_api_has_the_public_functions(site):
    assert "advantage_weights" in (site / "api/token_update.html").read_text("utf-8")
    assert "reward_func" in (site / "api/rewards.html").read_text("utf-8")


SEARCH = """new Promise(resolve => {
  document.querySelector("#__search").click()
  const input = document.querySelector(".md-search__input")
  input.dispatchEvent(new FocusEvent("focus"))
  input.value = "WORD"
  const looking = setInterval(() => {
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}))
    const found = [...document.querySelectorAll(".md-search-result__article")].map(article => article.innerText)
    if (found.length) { clearInterval(looking); resolve(found.join(" ")) }
  }, 200)
})"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_from_the_disk(site, width, tmp_path):
    """A wide table may scroll inside its frame, but never the page."""
    with browser.chromium(tmp_path) as page:
        for name in ("index", "flags", "study", "api/methods"):
            page.open(site / f"{name}.html", width, dark=False)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("document.querySelector('h1').innerText")
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            assert page.evaluate(broken) == []
        page.open(site / "index.html", width, dark=True)
        assert "--ckpt.load_enable" in page.evaluate(SEARCH.replace("WORD", "checkpoints"))
        elsewhere = [request for request in page.requests if not request.startswith(("file:", "data:", "blob:"))]
        assert not elsewhere
