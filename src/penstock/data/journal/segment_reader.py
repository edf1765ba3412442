"""Reads segments of a journal back. Tolerates the torn last line of a killed process, and a loss of power.

Used by the index, the answer cache, and a driver that recovers the rows of a crashed worker.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from penstock.data.journal.segment import Entry, run_number
from penstock.data.results.outcome import Outcome
from penstock.data.storage.paths import LocalPath, StoragePath, open_lines, unwritable
from penstock.errors import Error

log = logging.getLogger(__name__)

OFFSET_BITS = 40
"""Of a line's position: the number of its file, then its byte offset."""


class JournalBroken(Error):
    """A journal has a line that no run wrote; the message names the file and the line."""

    code = "journal_broken"


decode_line = msgspec.json.Decoder(Entry).decode


def segments(folder: StoragePath, spool: Path | None = None) -> list[Path]:
    """Local files with all lines of a journal, in the order in which they were begun. Raises: Unavailable."""
    found = (file.name for file in folder.files() if file.name.endswith(".jsonl"))
    names = sorted(found, key=lambda name: (run_number(name), name))
    if isinstance(folder, LocalPath):
        return [Path(folder.url) / name for name in names]
    assert spool is not None  # which a bucket's journal needs
    return _fetched(folder, names, spool)


def _fetched(folder: StoragePath, names: list[str], spool: Path) -> list[Path]:
    def fetch(name: str) -> Path:
        to = spool / name
        if not to.exists():
            data, part = (folder / name).read(), to.with_suffix(".part")
            try:
                part.write_bytes(data)
            except OSError as error:
                raise unwritable(str(to), error) from error
            part.rename(to)
        return to

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(fetch, names))


def outcomes_in(folder: StoragePath, name: str, rows: Container[int]) -> list[tuple[int, Outcome]]:
    """The rows among `rows` with an outcome in the segment `name`, that of a crashed worker."""
    found: list[tuple[int, Outcome]] = []
    for file in folder.files():
        if file.name.startswith(f"{name}.") and file.name.endswith(".jsonl"):
            where = folder / file.name
            with open_lines(where) as lines:
                for entry, _ in _entries(lines, where.url):
                    if entry.outcome is not None and entry.row in rows:
                        found.append((entry.row, entry.outcome))
    return found


def read_outcome(file: Path, at: int, key: str) -> Outcome | None:
    """The outcome in the line at byte `at`, if that is of this key."""
    with file.open("rb") as lines:
        lines.seek(at)
        found = decode_line(lines.readline())
    return found.outcome if found.key == key else None


def read_entries(file: Path) -> Iterator[tuple[Entry, int]]:
    """As `_entries`, of a segment. Raises: JournalBroken."""
    with file.open("rb") as lines:
        yield from _entries(lines, str(file))


def _entries(lines: IO[bytes], name: str) -> Iterator[tuple[Entry, int]]:
    """For each line: its entry and its byte offset. Raises: JournalBroken."""
    at = 0
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            return  # torn: its process was killed
        try:
            yield decode_line(text), at
        except ValueError as error:  # no JSON, no entry, or no UTF-8
            if b"\0" not in text:  # only a loss of power leaves zeros
                raise JournalBroken(
                    f"'{name}' is damaged in line {number} ({error}). Delete that line to run its row again."
                ) from error
            log.warning(
                "'%s' has zeros in line %d, as after a loss of power: its row runs again.", name, number
            )
        at += len(text)
