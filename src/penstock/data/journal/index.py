"""How each row ended, by the journal: read from all of its segments, answers left where they are.

Used by the job to know what is left, and by its output.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from pathlib import Path

from penstock.data.journal.segment_reader import (
    EntryHead,
    EntryLine,
    JournalBroken,
    decode_line,
    read_heads,
    segments,
)
from penstock.data.results.outcome import Outcome
from penstock.data.storage.paths import StoragePath

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
        self.tokens = [0, 0, 0]
        self.reused = 0
        self.error_codes: dict[int, str] = {}
        self.rows_by_key: dict[str, int] = {}
        self._states = bytearray()
        self._where = array("Q")
        self._files: list[Path] = []
        self._open: dict[int, int] = {}  # the one that was asked last comes last
        self._reading = threading.Lock()
        for number, file in enumerate(segments(folder, spool)):
            self._files.append(file)
            for head, at in read_heads(file):
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

    def outcome(self, row: int) -> Outcome:
        """How a row ended, which it has. Raises: JournalBroken."""
        entry = self._read(row)
        while entry.outcome is None and entry.duplicate_of is not None:
            entry = self._read(entry.duplicate_of)
        if entry.outcome is None:
            raise JournalBroken(f"The journal says that row {row} has ended, but not how.")
        return entry.outcome.outcome()

    def close(self) -> None:
        """Files that are read again are opened again."""
        with self._reading:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _take(self, head: EntryHead, where: int) -> None:
        if head.outcome is None and head.duplicate_of is None:
            self.deaths[head.row] = max(head.deaths, self.deaths.get(head.row, 0))
            return
        if head.row >= len(self._states):
            missing = head.row + 1 - len(self._states)
            self._states.extend(bytes(missing))
            self._where.extend([0] * missing)
        if head.tokens:
            for place, tokens in enumerate(head.tokens):
                self.tokens[place] += tokens
        if self._states[head.row] == _OK:
            return
        state = _OK if head.outcome is None else _STATES[head.outcome.state]
        self._states[head.row], self._where[head.row] = state, where
        if self.error_codes:
            self.error_codes.pop(head.row, None)
        if head.outcome is not None and head.outcome.failure is not None:
            self.error_codes[head.row] = sys.intern(head.outcome.failure.code)
        self.reused += head.duplicate_of is not None or head.reused
        if head.key is not None and state == _OK:
            self.rows_by_key.setdefault(head.key, head.row)

    def _read(self, row: int) -> EntryLine:
        number, at = divmod(self._where[row], 1 << _OFFSET_BITS)
        with self._reading:
            return decode_line(self._line(number, at))

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
