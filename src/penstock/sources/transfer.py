"""Downloads many files, or parts of one, side by side into a folder; retries where that helps.

A file is there under its name only when all of it is.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
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


def transfer(
    wanted: Sequence[Wanted], folder: Path, tries: int, deadline: float, watch: Watch = silent
) -> None:
    """Raises: DownloadFailed, naming the file; what `watch` raises."""
    missing = [one for one in wanted if not _is_whole(folder / one.name, one.file)]
    _check_space(missing, folder)
    total = _size_bytes(wanted)
    arrived = _Arrived(total - _size_bytes(missing), total, watch, deadline)
    jobs = [job for one in missing for job in _jobs(one, folder, tries, arrived)]
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="download") as pool:
        futures = [pool.submit(job.run) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        arrived.stopped.set()  # the others end at their next piece
        pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()


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


class _Arrived:
    """Bytes downloaded so far; tells every transfer when to stop."""

    def __init__(self, here: int, total: int, watch: Watch, deadline: float) -> None:
        self.stopped = threading.Event()
        self._bytes, self._total = here, total
        self._watch, self._deadline = watch, deadline
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        if time.monotonic() > self._deadline:
            raise _Late
        with self._lock:
            self._bytes += size_bytes
            self._watch(self._bytes, self._total)


class _Stopped(Exception):
    """Another file's transfer failed."""


class _Late(Exception):
    """The time limit has passed."""


@dataclass(slots=True)
class _Landing:
    """A file that is being put together from parts."""

    path: Path
    size_bytes: int
    parts: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def unfinished(self) -> Path:
        return self.path.with_name(self.path.name + _PART)

    def landed(self) -> None:
        """One part more is here; with the last one the file gets its name."""
        with self.lock:
            self.parts -= 1
            if self.parts == 0:
                self.unfinished.rename(self.path)


@dataclass(slots=True)
class _Job:
    """One part of one file, by itself on a thread."""

    wanted: Wanted
    start: int
    end: int
    landing: _Landing
    tries: int
    arrived: _Arrived

    def run(self) -> None:
        final, wait = (_Late, _Stopped, DownloadFailed), self.arrived.stopped.wait
        try:
            failures.retry(self._copy, self.tries, self._give_up, final=final, wait=wait)
        except _Late:
            raise DownloadFailed(f"The download of {self._what} was not finished in time.") from None
        self.landing.landed()

    def _copy(self) -> None:
        came = 0

        def count(size_bytes: int) -> None:
            nonlocal came
            came += size_bytes
            self.arrived.add(size_bytes)

        self.landing.unfinished.touch()
        try:
            self.wanted.store.copy(self.wanted.file, self.landing.unfinished, self.start, self.end, count)
            self._check_size(came)
        except Exception:
            if not self.arrived.stopped.is_set():
                self.arrived.add(-came)  # they will come again
            raise

    def _check_size(self, came: int) -> None:
        whole = self.start == 0 and self.end == self.landing.size_bytes
        here = self.landing.unfinished.stat().st_size if whole else came
        if here != self.end - self.start:
            raise failures.ShortFile(f"{here} of {self.end - self.start} bytes came")

    def _give_up(self, error: Exception, found: failures.FailureCause, attempts: int) -> NoReturn:
        sentence = f"The download of {self._what} failed{failures.after_tries(attempts)}: {found.why}."
        raise DownloadFailed(sentence) from cause(self.wanted.store, error)

    @property
    def _what(self) -> str:
        store, name = self.wanted.store, self.wanted.file.name
        return f"'{store.shown}'" if store.shown.endswith(f"/{name}") else f"'{store.shown}/{name}'"


def _jobs(wanted: Wanted, folder: Path, tries: int, arrived: _Arrived) -> list[_Job]:
    size, step = wanted.file.size_bytes, wanted.store.part_bytes or max(1, wanted.file.size_bytes)
    starts = range(0, max(1, size), step)
    path = folder / wanted.name
    path.parent.mkdir(parents=True, exist_ok=True)
    landing = _Landing(path, size, len(starts))
    return [_Job(wanted, at, min(at + step, size), landing, tries, arrived) for at in starts]
