"""docs/reference/configuration.md is what its generator prints."""

from pathlib import Path

from scripts.configuration_page import document

FILE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def test_the_committed_list_of_settings_is_current(monkeypatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)
    assert FILE.read_text() == document(), "run: make docs"
