"""What a pipeline has been answered, by content: so that no answer is asked for twice, whoever died.

Ray Data runs a task again when its actor dies, and a user runs a pipeline again when its driver did. Both
find here what was there already: the same request to the same model, and where its answer was drawn at random
the same row, too. Each actor writes a segment of its own, in the form of a job's journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from penstock.data.journal.segment import Entry, Segment
from penstock.data.journal.segment_reader import answered, read_outcome, segments
from penstock.data.results.outcome import Outcome
from penstock.data.rows.digest import is_deterministic, request_digest
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import storage_path
from penstock.errors import Error


@dataclass(frozen=True, slots=True)
class Key:
    """digest: of what is asked. is_drawn: another time the answer would be another one."""

    digest: str
    is_drawn: bool


class AnswerCache:
    """Answers in the folder or bucket `url`; only what is ok, so that failed rows are tried again."""

    def __init__(self, url: str) -> None:
        """Raises: JournalBroken, Unavailable."""
        folder = storage_path(url)
        self._spool = tempfile.TemporaryDirectory(prefix="penstock-")
        self._found: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
        for file in segments(folder, Path(self._spool.name)):
            for key, at in answered(file):
                self._found[key].append((file, at))
        self._unkept: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._segment = Segment(folder, f"pipeline-{uuid.uuid4().hex}", self._broke)

    async def answer(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """The kept answer, or that of `ask`, which is kept when this returns.

        Of answers that were drawn each is given once.
        Raises: Unavailable when it cannot be kept.
        """
        if found := self._found.get(key.digest):
            return await asyncio.to_thread(read_outcome, *(found.pop() if key.is_drawn else found[-1]))
        outcome = await ask()
        if outcome.state == "ok":
            loop = asyncio.get_running_loop()
            one = (loop, kept := loop.create_future())
            self._unkept.add(one)
            try:
                entry = Entry(row=0, end=outcome, key=key.digest)
                self._segment.append(entry, lambda: _settle(loop, kept, None))
                await kept
            finally:
                self._unkept.discard(one)
        return outcome

    def _broke(self, error: Error) -> None:
        """On any thread."""
        for loop, kept in list(self._unkept):
            _settle(loop, kept, error)

    def close(self) -> None:
        """All is kept. Safe to call twice."""
        self._segment.close()
        self._spool.cleanup()


def _settle(loop: asyncio.AbstractEventLoop, kept: asyncio.Future[None], error: Error | None) -> None:
    def settle() -> None:
        if not kept.done():
            kept.set_result(None) if error is None else kept.set_exception(error)

    loop.call_soon_threadsafe(settle)


def cache_key(ask: Any, row: Any, salt: bytes) -> Key:
    """salt: of the model that is asked. row: the user's, all of it."""
    if isinstance(ask, RowRequest) and is_deterministic(ask):
        return Key(request_digest(ask, salt), is_drawn=False)
    drawn = salt + _hash(row)
    return Key(
        request_digest(ask, drawn) if isinstance(ask, RowRequest) else _hash((drawn, ask)).hex(),
        is_drawn=True,
    )


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(cloudpickle.dumps(value), digest_size=16).digest()
