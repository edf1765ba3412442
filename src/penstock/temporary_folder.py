"""A new folder for temporary files, or a sentence about the disk that has no room for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from penstock.errors import Unavailable

_HELD = ".held"
_SOCKET_BYTES = 107  # of a Unix socket's path; Linux has no room for more
_FOLDER_BYTES = 43  # of one in a folder that is made here, below that for temporary files
_locks: dict[Path, int] = {}
"""Open files by this process's folders; the kernel frees their locks when it ends, in whatever way."""


def temporary_folder(kind: str, *, outlives: bool = False, sockets: bool = False) -> Path:
    """An empty folder named `penstock-<kind>-...`; the caller removes it.

    If its process ends before that, the next one that makes a folder removes it. outlives: nobody does.
    sockets: for Unix sockets with names of at most 12 characters.
    Raises: Unavailable.
    """
    try:
        place = short_place(_FOLDER_BYTES) if sockets else None
        if outlives:
            return Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-", dir=place))
        _remove_orphans()
        while True:
            folder = Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-", suffix=_HELD, dir=place))
            with suppress(BlockingIOError):  # another one takes it for an orphan, and removes it
                if (lock := _lock(folder)) is not None:
                    _locks[folder] = lock
                if folder.exists():
                    return folder
    except OSError as error:
        raise Unavailable(
            f"No temporary folder can be made: {error.strerror or error}. Free some space, or set TMPDIR to "
            "another folder."
        ) from error


def _remove_orphans() -> None:
    for folder in [one for one in list(_locks) if not one.exists()]:
        if (lock := _locks.pop(folder, None)) is not None:
            os.close(lock)
    for place in {tempfile.gettempdir(), short_place(_FOLDER_BYTES) or tempfile.gettempdir()}:
        for folder in Path(place).glob(f"penstock-*{_HELD}"):
            with suppress(BlockingIOError):
                if folder not in _locks and (lock := _lock(folder)) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def short_place(longest: int) -> str | None:
    """A folder for Unix sockets where that for temporary files has too long a path, as in some batch systems.

    longest: bytes of the sockets' paths below it.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) + longest > _SOCKET_BYTES
    return "/tmp" if too_long else None


def _lock(folder: Path) -> int | None:
    """An open file that locks it; None where that cannot be. Raises: BlockingIOError when another has it."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:  # not on every file system
        os.close(file)
        return None
    return file
