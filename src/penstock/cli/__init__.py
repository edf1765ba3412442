"""The `penstock` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from penstock.cli.app import app

    sys.path.append(
        os.getcwd()
    )  # last: the user's own modules, such as a preprocessor; Ray adds it to workers
    app(prog_name="penstock")
