"""What has become of each row, kept beside the output so that no death loses it.

    OUTPUT.journal/
    ├── job.json                 what was asked, and of which files
    ├── 0001-driver.jsonl        the first run's; one segment per process, one line per event
    ├── 0001-engine-1.jsonl
    └── 0002-engine-1.5f0c9a1e.000003.jsonl     in a bucket a segment is many objects: none can be appended to

A line is there before anybody is told that the row has ended. A segment is written by one process only and
never again by another, so that what a killed one left torn is always its last line.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.data.results.outcome import Outcome
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error, Unavailable

SYNC_S = 1.0
"""Between two `fsync` of a file, or two objects in a bucket."""

_SLOWEST_SYNC_S = 10.0
_OBJECTS_PER_SLOWER_S = 200
_MOST_PENDING_BYTES = 16 << 20
_PAUSE_S, _OUTAGE_S = 1.0, 300.0
"""Before a bucket that was out of reach is tried again, at first; and in all."""

_encode = msgspec.json.Encoder().encode


ON_DISK = {"outcome": "end", "duplicate_of": "of", "tokens": "used"}
"""Names of fields on disk, which journals of older versions have."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, rename=ON_DISK):
    """One line: a row has ended, or an engine has died with it.

    end: how it ended; where it is absent, `of` or `deaths` says something.
    of: the row whose identical request was answered for both.
    key: digest of the request, where its answer may be used again.
    deaths: of workers with this row in them, so far.
    used: tokens of its prompt, of these in the engine's cache, and of its answer.
    reused: whether the answer is one of another job.
    """

    row: int
    outcome: Outcome | None = None
    duplicate_of: int | None = None
    key: str | None = None
    deaths: int = 0
    tokens: tuple[int, int, int] = (0, 0, 0)
    reused: bool = False


def line(entry: Entry) -> bytes:
    """The entry in one line, whatever the engine's JSON looks like.

    Raises: msgspec.DecodeError when its body is not JSON.
    """
    end = entry.outcome
    if end is not None and end.body is not None:
        compact = msgspec.json.format(bytes(end.body), indent=-1)
        if len(compact) != len(bytes(end.body)):
            end = msgspec.structs.replace(end, body=msgspec.Raw(compact))
            entry = msgspec.structs.replace(entry, outcome=end)
    return _encode(entry) + b"\n"


class Segment:
    """The lines of one process. `keep` may be called from one thread only."""

    def __init__(
        self, folder: StoragePath, name: str, broken: Callable[[Error], None] = lambda error: None
    ) -> None:
        """broken: called once, on a thread, when lines that were taken cannot be kept; no `then` follows."""
        self._sink: _File | _Objects
        if folder.is_local:
            self._sink = _File(Path(folder.url) / f"{name}.jsonl", broken)
        else:
            self._sink = _Objects(folder, name, broken)

    def append(self, entry: Entry, then: Callable[[], None]) -> None:
        """Keeps a line. `then` is called when no death of this process can lose it, perhaps on a thread.

        Raises: Unavailable when the journal cannot be written: then nothing may go on.
        """
        self._sink.append(line(entry), then)

    def close(self) -> None:
        """All is kept, and every `then` called. Safe to call twice. Raises: Unavailable, once."""
        self._sink.close()


class _File:
    """On a disk: the kernel has a line at once, the disk within a second."""

    def __init__(self, path: Path, broken: Callable[[Error], None]) -> None:
        """Raises: Unavailable."""
        self._path, self._broken = path, broken
        self._error: Unavailable | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise _unwritable(str(self._path), error) from error
        self._dirty, self._ended = threading.Event(), threading.Event()
        self._syncing = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._syncing.start()

    def append(self, data: bytes, then: Callable[[], None]) -> None:
        if self._error is not None:  # a line behind one that is torn would not be read
            raise self._error
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._error = _unwritable(str(self._path), error)
            raise self._error from error
        self._dirty.set()
        then()

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._dirty.set()
            self._syncing.join()
            os.close(self._file)
            if self._error is not None:
                raise self._error

    def _sync(self) -> None:
        try:
            while not self._ended.is_set():
                self._dirty.wait()
                self._dirty.clear()
                os.fsync(self._file)
                self._ended.wait(SYNC_S)
            os.fsync(self._file)
        except OSError as error:
            self._error = _unwritable(str(self._path), error)
            self._broken(self._error)


class _Objects:
    """In a bucket: what has come since the last object becomes the next one, more seldom in a long run."""

    def __init__(self, folder: StoragePath, name: str, broken: Callable[[Error], None]) -> None:
        self._folder, self._broken = folder, broken
        self._name = f"{name}.{uuid.uuid4().hex[:8]}"  # two drivers may take each other for dead
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._thens: list[Callable[[], None]] = []
        self._bytes = self._objects = 0
        self._error: Unavailable | None = None
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._putting = threading.Thread(target=self._put_all, name="journal", daemon=True)
        self._putting.start()

    def append(self, data: bytes, then: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        with self._lock:
            self._lines.append(data)
            self._thens.append(then)
            self._bytes += len(data)
        if self._bytes > _MOST_PENDING_BYTES:
            self._wanted.set()

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._wanted.set()
            self._putting.join()
            if self._error is not None:
                raise self._error

    def _put_all(self) -> None:
        try:
            while not self._ended.is_set():
                self._wanted.wait(min(_SLOWEST_SYNC_S, SYNC_S + self._objects / _OBJECTS_PER_SLOWER_S))
                self._wanted.clear()
                self._put()
            self._put()
        except Exception as error:
            self._error = Unavailable(f"The journal cannot be written: {error}")
            self._broken(self._error)

    def _put(self) -> None:
        with self._lock:
            lines, thens = self._lines, self._thens
            self._lines, self._thens, self._bytes = [], [], 0
        if lines:
            self._objects += 1
            self._write(f"{self._name}.{self._objects:06d}.jsonl", b"".join(lines))
        for then in thens:
            then()

    def _write(self, name: str, data: bytes) -> None:
        """Tries again while that may help, as long as a job waits for its engines."""
        began, pause_s = time.monotonic(), _PAUSE_S
        while True:
            try:
                (self._folder / name).write(data)
                return
            except Unavailable as error:
                if not error.facts.get("retryable") or time.monotonic() - began > _OUTAGE_S:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLOWEST_SYNC_S)


def _unwritable(path: str, error: OSError) -> Unavailable:
    return Unavailable(f"The journal '{path}' cannot be written: {error.strerror or error}.")


def attempt(folder: StoragePath) -> int:
    """The number of the next run on this journal, from 1."""
    return 1 + max(
        (run_number(file.name) for file in folder.files() if file.name.endswith(".jsonl")), default=0
    )


def run_number(name: str) -> int:
    """The number of the run that began a segment; 0 of other files."""
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else 0


def now_s() -> float:
    """Seconds since 1970, for what is written to files."""
    return round(time.time(), 3)
