"""What a user of a script or a notebook sees while rows are answered."""

from __future__ import annotations

import sys
from typing import IO, Any

from tqdm.auto import tqdm


def bar(rows: int | None, screen: IO[str] | None = None) -> tqdm[Any]:
    """A progress bar on a terminal and in a notebook."""
    shown = (screen or sys.stderr).isatty() or "ipykernel" in sys.modules
    return tqdm(total=rows, unit=" rows", file=screen, leave=False, disable=not shown)
