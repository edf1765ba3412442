"""What a pipeline has been answered, by content: so that no answer is asked for twice, whoever died.

Ray Data runs a task again when its actor dies, and a user runs a pipeline again when its driver did. Both
find here what was there already: the same request, the first, second ... of its kind in its batch. Each actor
writes a segment of its own, in the form of a job's journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from penstock.data.index import answered, end_at, segments
from penstock.data.journal import Entry, Segment
from penstock.data.outcome import Outcome
from penstock.data.place import place
from penstock.data.request import Request
from penstock.errors import Error


class Memory:
    """Answers in the folder or bucket `url`; only what is ok, so that failed rows are tried again."""

    def __init__(self, url: str) -> None:
        """Raises: JournalBroken, Unavailable."""
        folder = place(url)
        self._spool = tempfile.TemporaryDirectory(prefix="penstock-")
        self._found: dict[str, tuple[Path, int]] = {}
        for file in segments(folder, Path(self._spool.name)):
            self._found |= {key: (file, at) for key, at in answered(file)}
        self._unkept: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._segment = Segment(folder, f"pipeline-{uuid.uuid4().hex}", self._broke)

    async def answer(self, key: str, ask: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """The kept answer, or that of `ask`, which is kept when this returns.

        Raises: Unavailable when it cannot be kept.
        """
        if key in self._found:
            return await asyncio.to_thread(end_at, *self._found[key])
        outcome = await ask()
        if outcome.state == "ok":
            loop = asyncio.get_running_loop()
            one = (loop, kept := loop.create_future())
            self._unkept.add(one)
            try:
                entry = Entry(row=0, end=outcome, key=key)
                self._segment.keep(entry, lambda: _settle(loop, kept, None))
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


def keys(asks: Sequence[Any]) -> list[str]:
    """One for each row of a batch: its content, and which of several like it in the batch it is."""
    seen: Counter[str] = Counter()
    found: list[str] = []
    for ask in asks:
        digest = _digest(ask)
        found.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return found


def _digest(ask: Any) -> str:
    whole = hashlib.blake2b(digest_size=16)
    is_one = isinstance(ask, Request)
    parts = (ask.path, ask.model, ask.body, ask.prompt) if is_one else (cloudpickle.dumps(ask),)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part or b""
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()
