"""Make pages of the site from files that lie elsewhere in the repository, and lead links to them there."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# File of the repository -> page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
# Tables that are too long for a page, and that pages link to.
TABLES = {str(path.relative_to(ROOT)): path.name for path in sorted((ROOT / "study/results").glob("*.csv"))}
_SOURCES = {page: file for file, page in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?!#|\w+:)([^)#\s]+)")


def page_link(link: str, page: str) -> str:
    """Return a link of a page's source as the site has it, where both are relative to where they stand.

    A link that leaves the site stays as it is, so that a strict build refuses it.
    """
    source = _SOURCES.get(page, f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in PAGES | TABLES:
        return posixpath.relpath((PAGES | TABLES)[target], posixpath.dirname(page) or ".")
    if target.startswith("docs/"):
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(page) or ".")
    return link


def on_files(files, config):
    """Add the pages and tables. MkDocs calls it."""
    from mkdocs.structure.files import File

    for file, page in (PAGES | TABLES).items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page, and keep figures with their intervals on one line. MkDocs calls it."""
    markdown = markdown.replace(" ± ", "\u00a0±\u00a0")
    return _LINK.sub(lambda match: page_link(match[1], page.file.src_uri), markdown)
