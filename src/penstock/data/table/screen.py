"""What a user of a script or a notebook sees while an engine starts and rows are answered."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any

from tqdm.auto import tqdm


@contextmanager
def quiet(verbose: bool = False) -> Generator[IO[str]]:
    """What libraries print, also from their threads and processes, goes nowhere. Yields the real stderr."""
    if verbose:
        yield sys.stderr
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept, nowhere = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with warnings.catch_warnings(action="ignore"), open(kept[1], "w", closefd=False) as screen:
            yield screen
    finally:
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def bar(rows: int | None, screen: IO[str] | None = None) -> tqdm[Any]:
    """A progress bar on a terminal and in a notebook."""
    shown = (screen or sys.stderr).isatty() or "ipykernel" in sys.modules
    return tqdm(total=rows, unit=" rows", file=screen, leave=False, disable=not shown)
