"""Every other URL, by fsspec and whichever file system is installed for its scheme."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fsspec import available_protocols
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from penstock.sources.protocol import Count, File, FileSource, shown

log = logging.getLogger(__name__)

_VERSIONS = (
    *("etag", "md5", "contentmd5", "sha", "digest", "generation"),
    *("mtime", "lastmodified", "modified", "modificationtime", "modify", "lastwritetime", "created"),
)
"""What file systems tell of a file's content, the surest first; in lower case, without `-` and `_`."""
_unversioned: set[str] = set()  # sources that the log has named


def unknown_protocol(url: str) -> str | None:
    """One of a URL, or of those within it, that fsspec does not know."""
    names = url.partition("://")[0].split("::")
    return next((name for name in names if name not in ("", *available_protocols())), None)


class FsspecSource(FileSource):
    """Files below a URL; a file by itself is a source with one file."""

    def __init__(self, url: str) -> None:
        self.shown = shown(url)
        self.has_secret_url = self.shown != url
        self._fs, path = url_to_fs(url)
        self._path = path.rstrip("/")
        self._alone = self.shown.rpartition("/")[2]  # its name if it is a file: no signature is part of it

    def files(self) -> list[File]:
        self._fs.invalidate_cache()  # a listing that fsspec keeps would hide every change
        found = [self._file(path, info) for path, info in self._fs.find(self._path, detail=True).items()]
        if not found:
            self._fs.ls(self._path)  # says why: `find` takes every failure for an empty folder
        if self.shown not in _unversioned and not all(file.version for file in found):
            _unversioned.add(self.shown)
            log.warning("%s tells no versions: a changed file of the same size is not noticed.", self.shown)
        return sorted(file for file in found if file.name)

    def children(self, holding: str) -> list[str]:
        entries = self._fs.ls(self._path, detail=True)
        names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted({name.rpartition("/")[2] for name in names if name != self._path})

    def copy(self, file: File, to: Path, start: int, end: int, count: Count) -> None:
        alone = file.name == self._alone and self._fs.isfile(self._path)
        path = self._path if alone else f"{self._path}/{file.name}"
        counting = _Counting(count)
        self._fs.get_file(path, str(to), callback=counting)
        count(max(0, end - counting.came))  # some file systems report no progress

    def _file(self, path: str, info: dict[str, Any]) -> File:
        if info.get("size") is None:  # a listing of a web server has only names
            info = self._fs.info(path)
        name = self._alone if path == self._path else path.removeprefix(f"{self._path}/")
        told = {key.lower().replace("-", "").replace("_", ""): value for key, value in info.items()}
        version = next((str(told[key]) for key in _VERSIONS if told.get(key)), "")
        return File(name, int(info.get("size") or 0), version)


class _Counting(Callback):
    """fsspec's callback, as a count of bytes."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count
        self.came = 0

    def relative_update(self, inc: int = 1) -> None:
        self.came += inc
        self._count(inc)
