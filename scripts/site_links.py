"""A hook of mkdocs: pages and links that lie outside docs/.

The log of measurements, the examples and the repository's own pages become pages of the site. Other files of
the repository have none: links to them become plain text. So the same Markdown can be read in the repository.
Marks of blocks that no test runs are left out.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "benchmarks/log.md": "inside/measurements.md",
    "CHANGELOG.md": "inside/changes.md",
    "CODE_OF_CONDUCT.md": "inside/conduct.md",
    "CONTRIBUTING.md": "inside/contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Files of the repository, and the pages that they become."""
_EXAMPLES = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in _ROOT.glob("examples/*.py")}
_MARK = re.compile(r"(?m)^ *<!-- not run: .* -->\n")
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text()))
    for source, page in _EXAMPLES.items():
        text = f"# {source}\n\n```python\n{(_ROOT / source).read_text()}```\n"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    here = page.file.src_uri
    pages = _PAGES | _EXAMPLES
    origin = {page: source for source, page in pages.items()}.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        there = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
        if there is None:
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(link, _MARK.sub("", markdown))
