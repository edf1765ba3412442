"""The cache of downloaded folders: `~/.cache/penstock/sources/<source>/<version>/`. The hub has its own.

A version appears by a rename, complete. The downloading process holds the source's lock, which the kernel
releases when it ends; the next one continues an unfinished download.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Settings
from penstock.errors import DownloadFailed, Unavailable

_LOOK_S = 0.1
_GRACE_S = 600.0
"""For which an unpinned version stays: a process may still read what `fetch` returned."""

_PARTIAL = ".partial"
_LOCK = "lock"
"""File in each source's cache folder that the downloading process locks."""

_held: dict[Path, int] = {}
"""A shared lock on a file beside each version that this process uses; the kernel releases them at its end."""


class Slot:
    """Cache entry of one source."""

    def __init__(self, source: str, shown: str) -> None:
        name = re.sub(r"[^\w.-]+", "--", shown)[-80:]
        key = hashlib.sha256(source.encode()).hexdigest()[:8]
        self.shown = shown
        self.folder = Settings.read().cache_folder() / "sources" / f"{name}-{key}"

    def find(self, version: str) -> Path | None:
        """The whole folder of this version, if it is here."""
        folder = self.folder / version
        try:
            os.utime(folder)
        except OSError:
            return None
        return folder

    def newest(self) -> Path | None:
        """The version that was used last."""
        return max(self._versions(), key=lambda folder: folder.stat().st_mtime, default=None)

    @contextmanager
    def locked(self, deadline: float) -> Generator[None]:
        """Only one process at a time is inside.

        Raises: DownloadFailed when another one still is at `deadline`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("a") as handle:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise DownloadFailed(
                        f"'{self.shown}' was not here in time: another process is still downloading it."
                    )
                time.sleep(_LOOK_S)
            yield

    def partial(self, version: str) -> Path:
        """Folder in which this version is assembled, with what an earlier try has left."""
        folder = self.folder / f"{version}{_PARTIAL}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, version: str) -> Path:
        """Turns the partial folder into the version, and deletes older ones that no process uses."""
        folder, partial = self.folder / version, self.folder / f"{version}{_PARTIAL}"
        for path in (*partial.rglob("*"), partial):  # a power cut must not leave a version that is not whole
            sync(path)
        partial.rename(folder)
        sync(self.folder)
        self._sweep(folder)
        return folder

    def _sweep(self, newest: Path) -> None:
        for unfinished in self.folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for folder in self._versions():
            if folder != newest and time.time() - folder.stat().st_mtime > _GRACE_S and not is_used(folder):
                gone = folder.rename(folder.with_name(f"{folder.name}{_PARTIAL}"))  # never half a version
                shutil.rmtree(gone, ignore_errors=True)
                _pin_file(folder).unlink(missing_ok=True)

    def _versions(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if path.is_dir() and path.suffix != _PARTIAL]


def sync(path: Path) -> None:
    """Returns when what was written to a file, or which names a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pin(folder: Path) -> None:
    """Keeps what `fetch` returned until this process ends. Unpinned older versions stay for ten minutes."""
    mark = _pin_file(folder)
    if mark in _held or not mark.parent.joinpath(_LOCK).exists():
        return  # pinned already, or not in the cache
    handle = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(handle, fcntl.LOCK_SH)
    _held[mark] = handle


def _pin_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.use")


def is_used(folder: Path) -> bool:
    """Whether any process has pinned it, this one included."""
    try:
        with _pin_file(folder).open("r+b") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Download:
    """One model or adapter. used: the last time, in seconds since 1970. hub: in the hub client's cache."""

    name: str
    size_bytes: int
    used: float
    folder: Path
    hub: bool

    def remove(self) -> None:
        """Raises: Unavailable while a process uses it."""
        if any(is_used(version) for version in self.folder.iterdir() if version.is_dir()):
            raise Unavailable(f"{self.name} is in use. End what serves it first.")
        shutil.rmtree(self.folder)


def cached() -> list[Download]:
    """What downloads have left in both caches, the largest first."""
    return sorted((*_of_hub(), *_of_sources()), key=lambda one: -one.size_bytes)


def _of_hub() -> list[Download]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        Download(one.repo_id, one.size_on_disk, one.last_accessed, one.repo_path, hub=True) for one in found
    ]


def _of_sources() -> list[Download]:
    folder = Settings.read().cache_folder() / "sources"
    found: list[Download] = []
    for one in folder.iterdir() if folder.is_dir() else ():
        files = [path for path in one.rglob("*") if path.is_file()]
        used = max((version.stat().st_mtime for version in one.iterdir()), default=0.0)
        name = one.name.rpartition("-")[0].replace("--", "/")
        found.append(Download(name, sum(path.stat().st_size for path in files), used, one, hub=False))
    return found
