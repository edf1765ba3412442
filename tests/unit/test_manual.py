"""The manual shows every page of docs/, and what its pages name of the code exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HISTORY = {"CHANGELOG.md", "log.md"}  # names of their time
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / name for name in HISTORY})
FOLDERS = ("src", "tests", "benchmarks", "examples", "recipes", "scripts")


def pages(entry: object) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    children = entry.values() if isinstance(entry, dict) else entry
    return set().union(*(pages(child) for child in children))


def test_every_page_has_a_place_in_the_manual():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - pages(nav) == set()


@cache
def files() -> list[str]:
    return [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def exists(dotted: str) -> bool:
    """Whether it is a module, or a name that stands in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT / "src" / Path(*parts[:length])
        module = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)
        if module:
            return all(re.search(rf"\b{name}\b", module.read_text()) for name in parts[length : length + 1])
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path):
    text = page.read_text()
    named = re.findall(r"`([a-z][\w/-]*\.py)`", text)
    unknown = [file for file in named if not any(known.endswith(f"/{file}") for known in files())]
    paths = re.findall(r"\bsrc/penstock[\w/.]*", text)
    unknown += [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
    text = re.sub(r"`penstock\.(request\.id|attempts)`", "", text)  # attributes of traces
    unknown += [name for name in re.findall(r"(?<![\w./-])penstock(?:\.\w+)+", text) if not exists(name)]
    assert unknown == []
