"""Make pages of the site from files that lie elsewhere in the repository, and lead links to them there."""

import html
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# File of the repository -> page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Files that pages link to: tables too long for a page, and the source to read first.
_READ_FIRST = [ROOT / "arlopti_openrlhf" / name for name in ("reference.py", "methods/ar.py", "methods/lopti.py")]
LINKED = [*sorted((ROOT / "study/results").glob("*.csv")), *_READ_FIRST]
FILES = {str(path.relative_to(ROOT)): path.name for path in LINKED}
_SOURCES = {page: file for file, page in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?!#|\w+:)([^)#\s]+)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
_ON_GITHUB = re.compile(r"^.*\]\(\.\./\.\./actions/.*\n\n?", re.M)  # a line that only GitHub can show
_LINKS_BY_PURPOSE = re.compile(r"^\| you want to \| read \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", re.M)


def page_link(link: str, page: str) -> str:
    """Return a link of a page's source as the site has it, where both are relative to where they stand.

    A link that leaves the site stays as it is, so that a strict build refuses it.
    """
    source = _SOURCES.get(page, f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in PAGES | FILES:
        return posixpath.relpath((PAGES | FILES)[target], posixpath.dirname(page) or ".")
    if target.startswith("docs/"):
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(page) or ".")
    return link


def on_files(files, config):
    """Add the pages and files. MkDocs calls it."""
    from mkdocs.structure.files import File

    for file, page in (PAGES | FILES).items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def cards(rows: str) -> str:
    """Return the rows of README.md's table of links, | purpose | links |, as cards."""
    pairs = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
    texts = [f"-   **{links}**\n\n    {purpose[0].upper()}{purpose[1:]}" for purpose, links in pairs]
    return "\n\n".join(['<div class="grid cards" markdown>', *texts, "</div>\n"])


def tree(lines: str) -> str:
    """Return a tree of files, which has two blanks for each folder, with texts that can go on below themselves."""
    parts = []
    for line in lines.splitlines():
        name, _, text = line.strip().partition(" ")
        text = re.sub("`(.*?)`", r"<code>\1</code>", html.escape(text.strip()))
        parts.append(f'<code style="margin-left: {len(line) - len(line.lstrip())}ch">{name}</code><span>{text}</span>')
    return "\n".join(['<div class="tree">', *parts, "</div>\n"])


def table(found: re.Match) -> str:
    """Return an HTML table whose cells know the title of their column, and whose code breaks between words alone."""
    titles = [re.sub("<.*?>", "", title) for title in re.findall("<th(?: [^>]*)?>(.*?)</th>", found[0], re.S)]
    cells = iter(range(found[0].count("<td")))

    def cell(td: re.Match) -> str:
        title = titles[next(cells) % len(titles)]
        words = re.sub("(?<=<code>)[^<]+", lambda code: re.sub(r"\S+", r"<span>\g<0></span>", code[0]), td[2])
        label = f' data-label="{title}"' if title else ""
        return f"<td{label}{td[1] or ''}>{words}</td>"

    return re.sub("<td( [^>]*)?>(.*?)</td>", cell, found[0], flags=re.S)


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page, and lay out what Markdown cannot. MkDocs calls it."""
    if page.file.src_uri == "flags.md":  # whoever types a flag looks for its row first, not for an error that names it
        page.meta["search"] = {"boost": 4}
    markdown = markdown.replace(" ± ", "\u00a0±\u00a0")  # figures stay on one line with their intervals
    markdown = _ON_GITHUB.sub("", markdown)
    markdown = _LINKS_BY_PURPOSE.sub(lambda match: cards(match[1]), markdown)
    markdown = _BLOCK.sub(lambda match: match[0] if match[1] else tree(match[2]), markdown)
    return _LINK.sub(lambda match: page_link(match[1], page.file.src_uri), markdown)


def on_page_content(html, page, config, files):
    """Prepare tables for narrow screens. MkDocs calls it."""
    return re.sub("<table>.*?</table>", table, html, flags=re.S)
