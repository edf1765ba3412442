"""What every kind of source can do, the kind that is here already, and names as they may be shown."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

Count = Callable[[int], None]
"""Called with the number of bytes that arrived, from any thread; an exception ends the transfer."""


@dataclass(frozen=True, slots=True, order=True)
class File:
    """One file of a source. name: its path below the source; version: differs when its content does."""

    name: str
    size_bytes: int
    version: str = ""


class FileSource(Protocol):
    """One kind of source. Calls raise what the client below raises; `failures` puts that into words."""

    shown: str
    has_secret_url: bool = False
    """Its URL holds secrets, and errors of its client may repeat them."""
    part_bytes: int | None = None
    """Larger files are read in parts of this size, side by side; None: in one piece."""

    def files(self) -> list[File]:
        """Every file below the source; none when there is no such folder."""
        ...

    def children(self, holding: str) -> list[str]:
        """Names of the folders directly below it that hold a file `holding`, sorted. All folders where to
        look into each would take a request.
        """
        ...

    def copy(self, file: File, to: Path, start: int, end: int, count: Count) -> None:
        """Writes bytes `start` to `end` of `file` into the file `to`, at the same place."""
        ...


class Folder(FileSource):
    """Files below `path` on this node, used as they are; a file by itself is a source with one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)

    def files(self) -> list[File]:
        if self.path.is_file():
            return [_file(self.path, self.path.parent)]
        return [_file(path, self.path) for path in sorted(self.path.rglob("*")) if path.is_file()]

    def children(self, holding: str) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if (path / holding).is_file())

    def copy(self, file: File, to: Path, start: int, end: int, count: Count) -> None:
        below = self.path.parent if self.path.is_file() else self.path
        shutil.copyfile(below / file.name, to)
        count(end - start)


def _file(path: Path, folder: Path) -> File:
    status = path.stat()
    version = f"{status.st_mtime_ns}-{status.st_ino}"
    return File(path.relative_to(folder).as_posix(), status.st_size, version)


def within(files: Iterable[File], name: str) -> list[str]:
    """Folders directly below the source that hold a file of this name, sorted."""
    return sorted({top for top, _, rest in (file.name.partition("/") for file in files) if rest == name})


def digest(files: Iterable[File]) -> str:
    """Twelve hexadecimal digits that change when any of the files does."""
    lines = "\n".join(f"{file.name}\0{file.size_bytes}\0{file.version}" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def cause(store: FileSource, error: Exception) -> Exception | None:
    """For `raise ... from`, which logs show: nothing where it could tell a secret."""
    return None if store.has_secret_url else error


def shown(source: str) -> str:
    """`source` without the credentials that a URL may hold: user, password, query (signatures)."""
    if "://" not in source:
        return source
    url = urlsplit(source)
    return urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
