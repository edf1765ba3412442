"""docs/configuration.md is what its generator prints."""

from pathlib import Path

from scripts.configuration_page import document

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_list_of_settings_is_current(monkeypatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)
    assert FILE.read_text() == document(), "run: python -m scripts.configuration_page > docs/configuration.md"
