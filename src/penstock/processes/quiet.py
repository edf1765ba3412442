"""A program's own output without what libraries print beside it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO


@contextmanager
def quiet(verbose: bool = False, *, own: bool = False) -> Generator[IO[str]]:
    """What libraries print, also from their threads and processes, goes nowhere. Yields the real stderr.

    own: whether what is printed by `sys.stdout` and `sys.stderr` still comes, such as a worker's output.
    """
    if verbose:
        yield sys.stderr
        return
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept, nowhere = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with (
            warnings.catch_warnings(action="ignore"),
            open(kept[0], "w", closefd=False) as out,
            open(kept[1], "w", buffering=1, closefd=False) as err,
        ):
            if own:  # in a notebook they are no files, and go on as they are
                sys.stdout = out if _is_file(sys.stdout, 1) else sys.stdout
                sys.stderr = err if _is_file(sys.stderr, 2) else sys.stderr
            yield err
    finally:
        sys.stdout, sys.stderr = streams
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def _is_file(stream: IO[str], number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False
