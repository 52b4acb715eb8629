"""Links between the pages in docs/ and the rest of the repository, when the site is built.

A page is written to be read in the repository, where ``../CONTRIBUTING.md`` leads to a file. The
site has no such file, unless this makes one: every file of the repository that a page of the site
names is copied into it, under ``repository/``, and links are rewritten to lead there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
"""Folder of the site for what lies outside docs/."""

PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "samkv_integrations/assets/builtin/README.md")
"""Markdown files outside docs/ that become pages; what they link to becomes a file."""

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that any page links to."""
    pages = {f"docs/{file.src_uri}": file for file in files.documentation_pages()}
    named = set(PAGES)
    for source in (*pages, *PAGES):
        text = (ROOT / source).read_text(encoding="utf-8")
        named |= {path for path in _linked(source, text) if not path.startswith("docs/")}
    for path in sorted(named):
        shown = f"{OUTSIDE}/{path}"
        if path.endswith(".md") and path not in PAGES:
            shown += ".txt"  # a page of its own would have links of its own
        files.append(File.generated(config, shown, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    source = _in_repository(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = _resolved(source, link[1])
        if not (ROOT / target).is_file():
            return link[0]  # the strict build says so
        if target.startswith("docs/"):
            shown = target.removeprefix("docs/")
        else:
            shown = f"{OUTSIDE}/{target}"
            if target.endswith(".md") and target not in PAGES:
                shown += ".txt"
        return posixpath.relpath(shown, here or ".") + (link[2] or "")

    return LINK.sub(rewritten, markdown)


def _in_repository(src_uri: str) -> str:
    """Path in the repository of a page of the site."""
    inside = src_uri.removeprefix(f"{OUTSIDE}/")
    return inside if inside != src_uri else f"docs/{src_uri}"


def _resolved(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _linked(source: str, text: str) -> set[str]:
    """Files of the repository that a page names."""
    paths = {_resolved(source, link) for link, _ in LINK.findall(text)}
    return {path for path in paths if (ROOT / path).is_file()}
