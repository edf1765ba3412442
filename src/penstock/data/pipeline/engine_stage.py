"""The engine's step of a processor: an actor of Ray Data with one backend, and a window of rows over it.

Ray Data calls it from several threads at a time, each with a batch of rows; they feed one window on an event
loop of the actor's own, so that the window is refilled row by row across batches. It returns each batch in
its order: Ray Data's own retries find outputs by their place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop

from penstock.data.backends.protocol import Backend
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.journal.answer_cache import AnswerCache, cache_key
from penstock.data.pipeline.preprocess import ASK, END, Table, packed, unpacked, users_columns
from penstock.data.results.outcome import Outcome

Run = Callable[[Any, Window], Coroutine[Any, Any, Any]]
"""What one row's ASK comes to, through the window."""


async def asked(request: Any, window: Window) -> Outcome:
    """One request: one answer."""
    return await window.run(request)


class EngineStage:
    """Batch with ASK -> batch with END."""

    def __init__(
        self,
        make: Callable[[], Backend],
        retry_policy: RetryPolicy,
        alone: bool = True,
        run: Run = asked,
        journal: str | None = None,
        most: int | None = None,
        identity: bytes = b"",
    ) -> None:
        """Returns when the backend is ready. identity: of the model, for the journal.

        Raises: what the backend's `start` raises.
        """
        self._run, self._identity = run, identity
        self._memory = AnswerCache(journal) if journal is not None else None
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="rows").start()
        self._window = self._wait(self._opened(make, retry_policy, alone, most))

    async def _opened(
        self, make: Callable[[], Backend], retry_policy: RetryPolicy, alone: bool, most: int | None
    ) -> Window:
        backend = make()
        await backend.start()
        return Window(backend, retry_policy, exclusive=alone, max_in_flight=most)

    def __call__(self, batch: Table) -> Table:
        rows = [None] * len(batch) if self._memory is None else users_columns(batch).to_pylist()
        ends = self._wait(self._ends(unpacked(batch, ASK), unpacked(batch, END), rows))
        return batch.drop_columns([ASK, END]).append_column(END, packed(ends))

    async def _ends(self, asks: list[Any], ends: list[Outcome | None], rows: list[Any]) -> list[Outcome]:
        return await asyncio.gather(*map(self._end, asks, ends, rows))

    async def _end(self, ask: Any, end: Outcome | None, row: Any) -> Outcome:
        if end is not None:
            return end
        run = partial(self._run, ask, self._window)
        if self._memory is None:
            return await run()
        return await self._memory.answer(cache_key(ask, row, self._identity), run)

    def __del__(self) -> None:
        """Ray Data's way to end an actor's work: the engine is stopped with it."""
        try:
            if self._memory is not None:
                self._memory.close()
            if hasattr(self, "_window"):  # it started
                self._wait(self._window.backend.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
