"""The outcome of each row, on disk beside the output, so that no crash loses it.

    OUTPUT.journal/
    ├── job.json                 the job's manifest: its spec and its input files
    ├── 0001-driver.jsonl        of the first run; one segment per process, one line per event
    ├── 0001-engine-1.jsonl
    └── 0002-engine-1.5f0c9a1e.000003.jsonl     in a bucket: many objects, as none can be appended to

A line is durable before its row is reported as completed. A segment is written by one process only, so that
only its last line can be torn by a kill.
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
from penstock.errors import Error, Unavailable, sentence

SYNC_S = 1.0
"""Between two `fsync` of a file, or two objects in a bucket."""

_SLOWEST_SYNC_S = 10.0
_OBJECTS_PER_SLOWER_S = 200
_MOST_PENDING_BYTES = 16 << 20
_PAUSE_S, _OUTAGE_S = 1.0, 300.0
"""First pause before an unreachable bucket is tried again; and the limit for all tries."""

_encode = msgspec.json.Encoder().encode


ON_DISK = {"outcome": "end", "duplicate_of": "of", "tokens": "used"}
"""Names of fields on disk, which journals of older versions have."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, rename=ON_DISK):
    """One line: a row is completed, or an engine died while it ran the row.

    outcome: None for entries that only record a duplicate or a count of deaths.
    duplicate_of: the row with the identical request whose answer serves both.
    key: digest of the request, if its answer may be reused.
    deaths: of workers while they ran this row, so far.
    tokens: of the prompt, of these in the engine's cache, of the answer.
    reused: whether the answer is from another job.
    """

    row: int
    outcome: Outcome | None = None
    duplicate_of: int | None = None
    key: str | None = None
    deaths: int = 0
    tokens: tuple[int, int, int] = (0, 0, 0)
    reused: bool = False


def encode_entry(entry: Entry) -> bytes:
    """The entry as one line, even if the engine's JSON has several.

    Raises: msgspec.DecodeError when its body is not JSON.
    """
    outcome = entry.outcome
    if outcome is not None and outcome.body:
        compact = msgspec.json.format(bytes(outcome.body), indent=-1)
        if len(compact) != len(bytes(outcome.body)):
            outcome = msgspec.structs.replace(outcome, body=msgspec.Raw(compact))
            entry = msgspec.structs.replace(entry, outcome=outcome)
    return _encode(entry) + b"\n"


class Segment:
    """The lines of one process. Call `append` from one thread at a time."""

    def __init__(
        self, folder: StoragePath, name: str, on_broken: Callable[[Error], object] = lambda error: None
    ) -> None:
        """on_broken: called once, on a thread, when appended lines are lost; no `on_durable` follows.

        Raises: Unavailable.
        """
        self._shown = f"'{folder.url}/{name}.jsonl' " if folder.is_local else ""
        self._on_broken = on_broken
        self._error: Unavailable | None = None
        try:
            self._lines = (_File if folder.is_local else _Objects)(folder, name)
        except OSError as error:
            raise self._broken(error) from error
        self._due, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._thread.start()

    def append(self, entry: Entry, on_durable: Callable[[], object]) -> None:
        """Appends a line; calls `on_durable`, perhaps on a thread, once no crash of this process can lose it.

        Raises: Unavailable when the journal cannot be written; the job must stop then.
        """
        if self._error is not None:  # a line after a torn one would not be read
            raise self._error
        try:
            is_due = self._lines.add(encode_entry(entry), on_durable)
        except OSError as error:
            raise self._broken(error) from error
        if is_due:
            self._due.set()

    def close(self) -> None:
        """Returns when all lines are durable and their `on_durable` called. Safe to call twice.

        Raises: Unavailable, once.
        """
        if not self._closed.is_set():
            self._closed.set()
            self._due.set()
            self._thread.join()
            self._lines.close()
            if self._error is not None:
                raise self._error

    def _sync(self) -> None:
        try:
            while not self._closed.is_set():
                self._due.wait(self._lines.wait_s)
                self._due.clear()
                self._lines.sync()
                self._closed.wait(self._lines.rest_s)
            self._lines.sync()
        except Exception as error:
            self._on_broken(self._broken(error))

    def _broken(self, error: Exception) -> Unavailable:
        why = error.strerror or error if isinstance(error, OSError) else error
        self._error = Unavailable(sentence(f"The journal {self._shown}cannot be written: {why}"))
        return self._error


class _File:
    """On a disk: the kernel has a line at once, the disk within `SYNC_S`."""

    wait_s, rest_s = None, SYNC_S

    def __init__(self, folder: StoragePath, name: str) -> None:
        path = Path(folder.url) / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def add(self, data: bytes, on_durable: Callable[[], object]) -> bool:
        """Whether to `sync` now."""
        while data:
            data = data[os.write(self._file, data) :]
        on_durable()
        return True

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class _Objects:
    """In a bucket: the lines since the last object become the next one, less often in a long run."""

    rest_s = 0.0

    def __init__(self, folder: StoragePath, name: str) -> None:
        self._folder = folder
        self._name = f"{name}.{uuid.uuid4().hex[:8]}"  # two drivers may each believe that the other crashed
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._callbacks: list[Callable[[], object]] = []
        self._bytes = self._objects = 0

    @property
    def wait_s(self) -> float:
        return min(_SLOWEST_SYNC_S, SYNC_S + self._objects / _OBJECTS_PER_SLOWER_S)

    def add(self, data: bytes, on_durable: Callable[[], object]) -> bool:
        """Whether to `sync` now."""
        with self._lock:
            self._lines.append(data)
            self._callbacks.append(on_durable)
            self._bytes += len(data)
        return self._bytes > _MOST_PENDING_BYTES

    def sync(self) -> None:
        with self._lock:
            lines, callbacks = self._lines, self._callbacks
            self._lines, self._callbacks, self._bytes = [], [], 0
        if lines:
            self._objects += 1
            self._write(f"{self._name}.{self._objects:06d}.jsonl", b"".join(lines))
        for on_durable in callbacks:
            on_durable()

    def close(self) -> None: ...

    def _write(self, name: str, data: bytes) -> None:
        """Retries passing failures, as long as a job waits for its engines."""
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


def next_run(folder: StoragePath) -> int:
    """The number of the next run on this journal; the first is 1."""
    return 1 + max(
        (run_number(file.name) for file in folder.files() if file.name.endswith(".jsonl")), default=0
    )


def run_number(name: str) -> int:
    """The number of the run that wrote a segment; 0 for other files."""
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else 0
