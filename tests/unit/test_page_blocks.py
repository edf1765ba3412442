"""Each command and program of README and the manual is run by a test, or says above it why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.reference_pages import FOLDER, PAGES
from tests.pages import MARK, ROOT, RUN, blocks

GENERATED = {ROOT / FOLDER / page for page in PAGES}
MANUAL = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md")} - GENERATED)
OTHERS = {"yaml", "json", "text", "promql"}
TAKEN = {
    page
    for file in ROOT.glob("tests/*/test_*.py")
    for page in re.findall(r'\bPage\(\s*"([\w./-]+\.md)"', file.read_text())
}
"""Pages that a test runs."""


def faults(text: str, taken: bool) -> list[str]:
    found = blocks(text)
    return [
        *(
            f"{one.line}: {one.language or 'no'} language"
            for one in found
            if one.language not in (*RUN, *OTHERS)
        ),
        *(f"{one.line}: not run" for one in found if one.language in RUN and not (taken or one.why)),
        *(f"{one.line}: nothing to run" for one in found if one.language in OTHERS and one.why),
        *["a mark above no block"]
        * (len(re.findall(f"(?m)^ *{MARK}", text)) - sum(one.why is not None for one in found)),
        *["a block that cannot be read"] * (len(re.findall("(?m)^ *```", text)) - 2 * len(found)),
    ]


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_is_run_or_says_why_not(page: Path):
    assert faults(page.read_text(), str(page.relative_to(ROOT)) in TAKEN) == []


def test_each_page_that_a_test_runs_exists():
    assert {page for page in TAKEN if not (ROOT / page).exists()} == set()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```bash\nls\n```\n", ["1: not run"]),
        (f"{MARK}as root -->\n```bash\nls\n```\n", []),
        (f"{MARK}as root -->\n\n```bash\nls\n```\n", ["3: not run", "a mark above no block"]),
        (f"{MARK}as root -->\n```yaml\na: 1\n```\n", ["2: nothing to run"]),
        ("```\n$ ls\n```\n", ["1: no language"]),
        ("  ```python\n  1\n", ["a block that cannot be read"]),
    ],
)
def test_a_block_that_nothing_runs_is_found(text: str, fault: list[str]):
    assert faults(text, taken=False) == fault
