"""A pipeline's answers by content, so that no request is answered twice, whatever crashed in between.

Ray Data runs a task again when its actor dies, and a user runs a pipeline again when its driver did. Both
find earlier answers here: those of the same request to the same model and, where the answer was sampled, of
the same row. Each actor writes a segment of its own, in the format of a job's journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import cloudpickle

from penstock.data.journal.segment import Entry, Segment
from penstock.data.journal.segment_reader import OFFSET_BITS, read_entries, read_outcome, segments
from penstock.data.results.outcome import Outcome
from penstock.data.rows.digest import SortedKeys, is_deterministic, request_digest
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import storage_path
from penstock.errors import Error
from penstock.temporary_folder import temporary_folder

_TAKEN = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CacheKey:
    """digest: of the request. is_sampled: another run would give another answer."""

    digest: str
    is_sampled: bool


class AnswerCache:
    """Answers in the folder or bucket `url`; only those that are ok, so that failed rows are run again."""

    def __init__(self, url: str) -> None:
        """Raises: JournalBroken, Unavailable."""
        folder = storage_path(url)
        self._spool = temporary_folder("answers")
        self._files = segments(folder, self._spool)
        self._stored = SortedKeys()
        for number, file in enumerate(self._files):
            for entry, at in read_entries(file):
                if entry.key is not None and entry.outcome is not None and entry.outcome.state == "ok":
                    self._stored.add(entry.key, number << OFFSET_BITS | at)
        self._stored.sort()
        self._pending: set[Future[None]] = set()
        self._segment = Segment(folder, f"pipeline-{uuid.uuid4().hex}", self._on_broken)

    async def get_or_run(self, key: CacheKey, run: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """The stored answer, or that of `run`, which is stored before this returns.

        Each stored answer that was sampled is returned once.
        Raises: Unavailable when the answer cannot be stored.
        """
        if (where := self._take(key)) is not None:
            number, at = divmod(where, 1 << OFFSET_BITS)
            found = await asyncio.to_thread(read_outcome, self._files[number], at, key.digest)
            if found is not None:
                return found
        outcome = await run()
        if outcome.state == "ok":
            stored = Future[None]()
            stored.set_running_or_notify_cancel()  # so that nobody can cancel it
            self._pending.add(stored)
            try:
                entry = Entry(row=0, outcome=outcome, key=key.digest)
                self._segment.append(entry, lambda: stored.set_result(None))
                await asyncio.wrap_future(stored)
            finally:
                self._pending.discard(stored)
        return outcome

    def _take(self, key: CacheKey) -> int | None:
        """The position of a stored answer that may still be returned."""
        for slot in self._stored.slots(key.digest):
            if (where := self._stored.numbers[slot]) != _TAKEN:
                if key.is_sampled:
                    self._stored.numbers[slot] = _TAKEN
                return where
        return None

    def _on_broken(self, error: Error) -> None:
        """On any thread."""
        for stored in list(self._pending):
            if not stored.done():
                stored.set_exception(error)

    def close(self) -> None:
        """Returns when all answers are stored. Safe to call twice."""
        self._segment.close()
        shutil.rmtree(self._spool, ignore_errors=True)


def cache_key(request: Any, row: Any, salt: bytes) -> CacheKey:
    """salt: identity of the model. row: all of the user's columns."""
    if isinstance(request, RowRequest) and is_deterministic(request):
        return CacheKey(request_digest(request, salt), is_sampled=False)
    sampled = salt + _hash(row)
    if isinstance(request, RowRequest):
        return CacheKey(request_digest(request, sampled), is_sampled=True)
    return CacheKey(_hash((sampled, request)).hex(), is_sampled=True)


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(cloudpickle.dumps(value), digest_size=16).digest()
