"""Pins cached versions that a running process uses, so that they are not deleted.

A pin is a shared lock on a file beside the version; the kernel releases it when the process ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}


def pin(folder: Path) -> None:
    """Keeps what `fetch` returned until this process ends. Unpinned older versions stay for ten minutes."""
    mark = pin_file(folder)
    if mark in _held or not mark.parent.joinpath(LOCK).exists():
        return  # pinned already, or not in the cache
    handle = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(handle, fcntl.LOCK_SH)
    _held[mark] = handle


LOCK = "lock"
"""File in each source's cache folder that the downloading process locks."""


def pin_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.use")


def is_pinned(folder: Path) -> bool:
    """Whether any process has pinned it, this one included."""
    try:
        handle = os.open(pin_file(folder), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
