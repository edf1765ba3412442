"""A new folder for temporary files, or a sentence about the disk that has no room for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.errors import Unavailable


def temporary_folder(kind: str) -> Path:
    """An empty folder named `penstock-<kind>-...`; the caller removes it. Raises: Unavailable."""
    try:
        return Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-"))
    except OSError as error:
        raise Unavailable(
            f"No temporary folder can be made: {error.strerror or error}. Free some space, or set TMPDIR to "
            "another folder."
        ) from error
