"""mkdocs.yml: the manual shows every page of docs/."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def pages(entry: object) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    children = entry.values() if isinstance(entry, dict) else entry
    return set().union(*(pages(child) for child in children))


def test_every_page_has_a_place_in_the_manual():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - pages(nav) == set()
