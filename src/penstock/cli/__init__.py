"""The `penstock` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """No exit other than 0, and 130 for Ctrl-C, without a sentence on stderr."""
    from penstock.cli.app import app
    from penstock.cli.process.failure import INTERRUPTED, crashed, is_interrupt

    # Last: the user's own modules, such as a preprocessor; Ray adds it to workers.
    sys.path.append(os.getcwd())
    try:
        app(prog_name="penstock")
    except Exception as error:
        sys.exit(INTERRUPTED if is_interrupt(error) else crashed(error))
