"""Writes the files of docs/reference that come from the code: `python -m scripts.reference_pages`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts import command_line_page, configuration_page, http_api_page, metrics_page

from penstock.config.fleet.editor_schema import editor_schema

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "command-line.md": command_line_page.document,
    "configuration.md": configuration_page.document,
    "http-api.md": http_api_page.document,
    "fleet.schema.json": lambda: json.dumps(editor_schema(), indent=1) + "\n",
    "metrics.md": metrics_page.document,
}


def main() -> None:
    for name, document in PAGES.items():
        (FOLDER / name).write_text(document())


if __name__ == "__main__":
    main()
