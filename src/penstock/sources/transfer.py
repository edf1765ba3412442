"""Downloads many files, or parts of one, side by side into a folder; retries where that helps.

A file is there under its name only when all of it is.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.errors import DownloadFailed
from penstock.sources import failures
from penstock.sources.protocol import File, FileSource, cause

Watch = Callable[[int, int], None]
"""Called with bytes downloaded and bytes in all, from any thread. An exception ends the download."""

_WORKERS = 16
_PART = ".part"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One file, and where in the folder it goes."""

    store: FileSource
    file: File
    name: str


def silent(done: int, total: int) -> None:
    """A `Watch` that does nothing."""


def transfer(wanted: Sequence[Wanted], folder: Path, tries: int, deadline: float, watch: Watch) -> None:
    """Raises: DownloadFailed, naming the file; what `watch` raises."""
    missing = [one for one in wanted if not _is_whole(folder / one.name, one.file)]
    _check_space(missing, folder)
    total = _size_bytes(wanted)
    arrived = Arrived(total - _size_bytes(missing), total, watch, deadline)
    parts = [part for one in missing for part in _parts(one, folder)]
    left = Counter(part.path for part in parts)
    failed: BaseException | None = None
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="download") as pool:
        fetching = {pool.submit(part.fetch, tries, arrived): part for part in parts}
        try:
            for fetched in as_completed(fetching):
                if (error := fetched.exception()) is not None:
                    failed = failed or error
                    arrived.stopped.set()  # the others end at their next piece; whole ones are kept
                    continue
                part = fetching[fetched]
                left[part.path] -= 1
                if not left[part.path]:
                    part.unfinished.rename(part.path)
        finally:
            arrived.stopped.set()
            pool.shutdown(cancel_futures=True)
    if failed is not None:
        raise failed


def _is_whole(path: Path, file: File) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes


def _check_space(missing: Sequence[Wanted], folder: Path) -> None:
    needed, free = _size_bytes(missing), shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadFailed(
            f"'{missing[0].store.shown}' does not fit on the disk: it needs {needed / 1e9:.1f} GB more, and "
            f"{folder} has {free / 1e9:.1f} GB. Free some, or name another folder in PENSTOCK_CACHE."
        )


def _size_bytes(wanted: Sequence[Wanted]) -> int:
    return sum(one.file.size_bytes for one in wanted)


class Arrived:
    """Bytes downloaded so far; tells every transfer when to stop."""

    def __init__(self, here: int, total: int, watch: Watch, deadline: float) -> None:
        self.stopped = threading.Event()
        self._bytes, self._total = here, total
        self._watch, self._deadline = watch, deadline
        self._lock = threading.Lock()

    def add(self, size_bytes: int, what: str) -> None:
        """Raises: CancelledError once stopped; DownloadFailed after the deadline; what `watch` raises."""
        if self.stopped.is_set():
            raise CancelledError
        if time.monotonic() > self._deadline:
            raise DownloadFailed(f"The download of {what} was not finished in time.")
        with self._lock:
            self._bytes += size_bytes
            self._watch(min(self._bytes, self._total), self._total)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of one file, by itself on a thread. path: of the file, once all of it is there."""

    wanted: Wanted
    path: Path
    start: int
    end: int

    @property
    def unfinished(self) -> Path:
        return self.path.with_name(self.path.name + _PART)

    def fetch(self, tries: int, arrived: Arrived) -> None:
        if arrived.stopped.is_set():
            raise CancelledError
        final, wait = (CancelledError, DownloadFailed), arrived.stopped.wait
        failures.retry(lambda: self._copy(arrived), tries, self._give_up, final=final, wait=wait)

    def _copy(self, arrived: Arrived) -> None:
        came, size = 0, self.end - self.start

        def count(size_bytes: int) -> None:
            nonlocal came
            came += size_bytes
            arrived.add(size_bytes, self._what)

        self.unfinished.touch()
        try:
            self.wanted.store.copy(self.wanted.file, self.unfinished, self.start, self.end, count)
            here = self.unfinished.stat().st_size if size == self.wanted.file.size_bytes else came
            if here != size:
                raise failures.ShortFile(f"{here} of {size} bytes came")
        except Exception:
            if not arrived.stopped.is_set():
                arrived.add(-came, self._what)  # they will come again
            raise

    def _give_up(self, error: Exception, found: failures.FailureCause, attempts: int) -> NoReturn:
        sentence = f"The download of {self._what} failed{failures.after_tries(attempts)}: {found.why}."
        raise DownloadFailed(sentence) from cause(self.wanted.store, error)

    @property
    def _what(self) -> str:
        store, name = self.wanted.store, self.wanted.file.name
        return f"'{store.shown}'" if store.shown.endswith(f"/{name}") else f"'{store.shown}/{name}'"


def _parts(wanted: Wanted, folder: Path) -> list[_Part]:
    size, path = wanted.file.size_bytes, folder / wanted.name
    step = wanted.store.part_bytes or max(1, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    return [_Part(wanted, path, at, min(at + step, size)) for at in range(0, max(1, size), step)]
