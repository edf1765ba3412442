"""The state of each row, read from all segments of a journal; answers stay on disk.

Tells the job which rows are left, and its output where their outcomes are.
"""

from __future__ import annotations

import re
import threading
from array import array
from pathlib import Path
from typing import BinaryIO

from penstock.data.journal.segment import Entry
from penstock.data.journal.segment_reader import (
    OFFSET_BITS,
    JournalBroken,
    decode_line,
    read_entries,
    segments,
)
from penstock.data.results.outcome import Outcome
from penstock.data.rows.digest import SortedKeys
from penstock.data.storage.paths import StoragePath

_NAMES = (None, "ok", "failed", "skipped")
_STATES = {name: state for state, name in enumerate(_NAMES) if name is not None}
_OK = _STATES["ok"]
_OPEN_FILES, _BUFFER_BYTES = 64, 1 << 13
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\d[\d.,]*")
_MOST_KINDS = 1000
_ROWS_AT_A_TIME = 1 << 12  # by which the index grows


class Index:
    """State and position of each row's outcome. Nine bytes per row, 16 per key.

    Of several outcomes of a row the first `ok` counts, else the last. tokens: of all outcomes in all runs, as
    in `Entry`. reused: rows with another row's answer. error_kinds: of failed rows, the code and the message
    without its values.
    """

    def __init__(self, folder: StoragePath, spool: Path | None = None) -> None:
        """spool: a local folder for copies of a bucket's segments.

        Raises: JournalBroken.
        """
        self.deaths: dict[int, int] = {}
        self.tokens = [0, 0, 0]
        self.reused = 0
        self.error_kinds: dict[int, tuple[str, str]] = {}
        self._keys = SortedKeys()
        self._states = bytearray()
        self._where = array("Q")
        self._kinds: dict[tuple[str, str], tuple[str, str]] = {}
        self._files: list[Path] = []
        self._open: dict[int, BinaryIO] = {}  # least recently used first
        self._reading = threading.Lock()
        for number, file in enumerate(segments(folder, spool)):
            self._files.append(file)
            for entry, at in read_entries(file):
                self._take(entry, number << OFFSET_BITS | at)
        self._keys.sort()

    def row_with(self, key: str) -> int | None:
        """The first row that was answered, whose request has this digest."""
        rows = (self._keys.numbers[slot] for slot in self._keys.slots(key))
        return next((row for row in rows if self._read(row).key == key), None)

    def state(self, row: int) -> str | None:
        """`ok`, `failed`, `skipped`, or None for a row without an outcome."""
        return _NAMES[self._states[row]] if row < len(self._states) else None

    def counts(self) -> dict[str, int]:
        """Rows by state."""
        return {name: self._states.count(value) for name, value in _STATES.items()}

    def outcome(self, row: int) -> Outcome:
        """The outcome of a row that has one. Raises: JournalBroken."""
        entry = self._read(row)
        while entry.outcome is None and entry.duplicate_of is not None:
            entry = self._read(entry.duplicate_of)
        if entry.outcome is None:
            raise JournalBroken(f"The journal has row {row} as completed, but no outcome of it.")
        return entry.outcome

    def close(self) -> None:
        """Closes all files; later reads open them again."""
        with self._reading:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _take(self, entry: Entry, where: int) -> None:
        if entry.outcome is None and entry.duplicate_of is None:
            self.deaths[entry.row] = max(entry.deaths, self.deaths.get(entry.row, 0))
            return
        row = entry.row
        if row >= len(self._states):
            missing = bytes(row + _ROWS_AT_A_TIME - len(self._states))
            self._states.extend(missing)
            self._where.frombytes(8 * missing)
        self.tokens[0] += entry.tokens[0]
        self.tokens[1] += entry.tokens[1]
        self.tokens[2] += entry.tokens[2]
        if self._states[row] == _OK:
            return
        state = _OK if entry.outcome is None else _STATES[entry.outcome.state]
        self._states[row], self._where[row] = state, where
        if self.error_kinds:
            self.error_kinds.pop(row, None)
        if entry.outcome is not None and (failure := entry.outcome.failure) is not None:
            kind = failure.code, _VALUES.sub("_", failure.message)
            kind = kind if len(self._kinds) < _MOST_KINDS or kind in self._kinds else (failure.code, "")
            self.error_kinds[row] = self._kinds.setdefault(kind, kind)
        self.reused += entry.duplicate_of is not None or entry.reused
        if entry.key is not None and state == _OK:
            self._keys.add(entry.key, row)

    def _read(self, row: int) -> Entry:
        number, at = divmod(self._where[row], 1 << OFFSET_BITS)
        with self._reading:
            file = self._opened(number)
            file.seek(at)
            line = file.readline()
        if not line.endswith(b"\n"):
            raise JournalBroken(f"'{self._files[number]}' has become shorter.")
        return decode_line(line)

    def _opened(self, number: int) -> BinaryIO:
        """A bucket's journal has a file per second of the job: they cannot all be open."""
        file = self._open.pop(number, None)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            file = self._files[number].open("rb", _BUFFER_BYTES)
        self._open[number] = file
        return file
