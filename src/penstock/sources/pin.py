"""Versions in the cache that a living process uses: they are not swept away.

A shared lock on a file beside the version, which the kernel gives back when the process ends, however.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}


def hold(folder: Path) -> None:
    """Keeps what `fetch` gave while this process lives. Without it a former version has ten minutes."""
    mark = marked(folder)
    if mark in _held or not mark.parent.joinpath(LOCK).exists():
        return  # held already, or no folder of the cache
    handle = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(handle, fcntl.LOCK_SH)
    _held[mark] = handle


LOCK = "lock"
"""The file in each source's folder of the cache that its downloader has locked."""


def marked(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.use")


def is_held(folder: Path) -> bool:
    """Whether any process holds it, this one included."""
    try:
        handle = os.open(marked(folder), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
