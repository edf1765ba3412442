"""Generated pages of docs/reference are what their generators print."""

from pathlib import Path

import pytest
from scripts.reference_pages import FOLDER, PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_committed_page_is_current(page: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)
    assert (Path(FOLDER) / page).read_text() == PAGES[page](), "run: make docs"
