"""A folder of this node. It is used as it is; nothing is copied."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.sources.protocol import Count, File


class Folder:
    """Files below `path`; a file by itself is a source with one file."""

    has_secret_url = False
    part_bytes: int | None = None

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
