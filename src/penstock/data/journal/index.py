"""How each row ended, by the journal: read from all of its segments, answers left where they are.

Used by the job to know what is left, and by the sink to write the output. It knows what kills do to files.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from array import array
from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from penstock.data.journal.segment import run_of
from penstock.data.results.outcome import Failure, Outcome, State
from penstock.data.storage.paths import LocalPath, StoragePath
from penstock.errors import Error

log = logging.getLogger(__name__)


class JournalBroken(Error):
    """A journal holds what no run has written; the message names the file and the line."""

    code = "journal_broken"


class _Failure(msgspec.Struct):
    code: str


class _State(msgspec.Struct):
    state: str
    failure: _Failure | None = None


class _Head(msgspec.Struct):
    """As much of an entry as the index needs; the answer is passed over."""

    row: int
    end: _State | None = None
    of: int | None = None
    key: str | None = None
    deaths: int = 0
    used: tuple[int, int, int] | None = None
    reused: bool = False


class _End(msgspec.Struct):
    """An outcome as it is read: msgspec takes `Raw` only by itself."""

    state: State
    attempts: int = 1
    deaths: int = 0
    body: msgspec.Raw = msgspec.Raw()
    failure: Failure | None = None
    waited_s: float = 0.0
    took_s: float = 0.0

    def outcome(self) -> Outcome:
        return Outcome(
            state=self.state,
            attempts=self.attempts,
            deaths=self.deaths,
            body=self.body if bytes(self.body) else None,
            failure=self.failure,
            waited_s=self.waited_s,
            took_s=self.took_s,
        )


class _Line(msgspec.Struct):
    row: int
    end: _End | None = None
    of: int | None = None


_head = msgspec.json.Decoder(_Head).decode
_line = msgspec.json.Decoder(_Line).decode


_NONE, _OK, _FAILED, _SKIPPED = range(4)
_STATES = {"ok": _OK, "failed": _FAILED, "skipped": _SKIPPED}
_NAMES = (None, "ok", "failed", "skipped")
_OFFSET_BITS = 40
_OPEN_FILES = 64


class Index:
    """Where the journal says how each row ended. Nine bytes a row, some 200 a key; answers stay on the disk.

    Of several ends of a row the first `ok` counts, else the last one. used: tokens of all that was answered,
    as in `Entry`, in all runs. reused: rows with another row's answer. codes: of rows that have failed.
    keys: rows by the digest of their requests.
    """

    def __init__(self, folder: StoragePath, spool: Path | None = None) -> None:
        """spool: a folder of this machine for copies of a bucket's segments.

        Raises: JournalBroken.
        """
        self.deaths: dict[int, int] = {}
        self.used = [0, 0, 0]
        self.reused = 0
        self.codes: dict[int, str] = {}
        self.keys: dict[str, int] = {}
        self._states = bytearray()
        self._where = array("Q")
        self._files: list[Path] = []
        self._open: dict[int, int] = {}  # the one that was asked last comes last
        self._reading = threading.Lock()
        for number, file in enumerate(segments(folder, spool)):
            self._files.append(file)
            for head, at in _heads(file):
                self._take(head, number << _OFFSET_BITS | at)

    def state(self, row: int) -> str | None:
        """`ok`, `failed`, `skipped`, or None for a row that has not ended."""
        return _NAMES[self._states[row]] if row < len(self._states) else None

    def __len__(self) -> int:
        """Rows up to the last one that has ended."""
        return len(self._states)

    def counts(self) -> dict[str, int]:
        """Rows by state."""
        return {name: self._states.count(value) for name, value in _STATES.items()}

    def end(self, row: int) -> Outcome:
        """How a row ended, which it has. Raises: JournalBroken."""
        entry = self._read(row)
        while entry.end is None and entry.of is not None:
            entry = self._read(entry.of)
        if entry.end is None:
            raise JournalBroken(f"The journal says that row {row} has ended, but not how.")
        return entry.end.outcome()

    def close(self) -> None:
        """Files that are read again are opened again."""
        with self._reading:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _take(self, head: _Head, where: int) -> None:
        if head.end is None and head.of is None:
            self.deaths[head.row] = max(head.deaths, self.deaths.get(head.row, 0))
            return
        if head.row >= len(self._states):
            missing = head.row + 1 - len(self._states)
            self._states.extend(bytes(missing))
            self._where.extend([0] * missing)
        if head.used:
            for place, tokens in enumerate(head.used):
                self.used[place] += tokens
        if self._states[head.row] == _OK:
            return
        state = _OK if head.end is None else _STATES[head.end.state]
        self._states[head.row], self._where[head.row] = state, where
        if self.codes:
            self.codes.pop(head.row, None)
        if head.end is not None and head.end.failure is not None:
            self.codes[head.row] = sys.intern(head.end.failure.code)
        self.reused += head.of is not None or head.reused
        if head.key is not None and state == _OK:
            self.keys.setdefault(head.key, head.row)

    def _read(self, row: int) -> _Line:
        number, at = divmod(self._where[row], 1 << _OFFSET_BITS)
        with self._reading:
            return _line(self._line(number, at))

    def _line(self, number: int, at: int) -> bytes:
        file = self._opened(number)
        data, size = b"", 1 << 13
        while not data.endswith(b"\n"):
            more = os.pread(file, size, at + len(data))
            end = more.find(b"\n")
            data += more if end < 0 else more[: end + 1]
            size *= 4
            if not more:
                raise JournalBroken(f"'{self._files[number]}' has become shorter.")
        return data

    def _opened(self, number: int) -> int:
        """A descriptor. In a bucket each second of a job has made a file: they cannot all be open."""
        file = self._open.pop(number, None)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            file = os.open(self._files[number], os.O_RDONLY)
        self._open[number] = file
        return file


def segments(folder: StoragePath, spool: Path | None = None) -> list[Path]:
    """Files of this machine with all lines of a journal, in the order in which they were begun."""
    found = (file.name for file in folder.files() if file.name.endswith(".jsonl"))
    names = sorted(found, key=lambda name: (run_of(name), name))
    if isinstance(folder, LocalPath):
        return [Path(folder.url) / name for name in names]
    if spool is None:
        raise AssertionError("a bucket's journal is read by way of a spool")
    return _fetched(folder, names, spool)


def _fetched(folder: StoragePath, names: list[str], spool: Path) -> list[Path]:
    from concurrent.futures import ThreadPoolExecutor

    def fetch(name: str) -> Path:
        to = spool / name
        if not to.exists():
            part = to.with_suffix(".part")
            part.write_bytes((folder / name).read())
            part.rename(to)
        return to

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(fetch, names))


def ended_in(folder: StoragePath, name: str, rows: Container[int]) -> list[tuple[int, Outcome]]:
    """Those of `rows` that have ended, by the segment `name`: of a worker that has died."""
    found: list[tuple[int, Outcome]] = []
    for file in folder.files():
        if file.name.startswith(f"{name}.") and file.name.endswith(".jsonl"):
            where = folder / file.name
            with io.BufferedReader(cast("Any", where.open()), 1 << 20) as lines:
                for head, _, text in _entries(lines, where.url):
                    if head.end is not None and head.row in rows and (end := _line(text).end) is not None:
                        found.append((head.row, end.outcome()))
    return found


def answered(file: Path) -> Iterator[tuple[str, int]]:
    """Digests of requests with an answer that is ok in a segment, and where in it. Raises: JournalBroken."""
    for head, at in _heads(file):
        if head.key is not None and head.end is not None and head.end.state == "ok":
            yield head.key, at


def end_at(file: Path, at: int) -> Outcome:
    """How the row of the line at byte `at` ended."""
    with file.open("rb") as lines:
        lines.seek(at)
        found = _line(lines.readline()).end
    if found is None:
        raise JournalBroken(f"'{file}' has no end of a row at byte {at}.")
    return found.outcome()


def _heads(file: Path) -> Iterator[tuple[_Head, int]]:
    with file.open("rb") as lines:
        for head, at, _ in _entries(lines, str(file)):
            yield head, at


def _entries(lines: IO[bytes], name: str) -> Iterator[tuple[_Head, int, bytes]]:
    """Of each line what the index needs, where it begins, and the line. Raises: JournalBroken."""
    at = 0
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            return  # a process was killed while it wrote this
        try:
            yield _head(text), at, text
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            if b"\0" not in text:  # which a machine that loses power leaves, and nothing else
                raise JournalBroken(
                    f"'{name}' is damaged in line {number} ({error}). Delete that line to run its row again."
                ) from error
            log.warning(
                "'%s' has zeros in line %d, as after a loss of power: its row is run again.", name, number
            )
        at += len(text)
