"""The engine stage of a processor: an actor of Ray Data with one backend, and a window of rows over it.

Ray Data calls it from several threads at a time, each with a batch of rows. They feed one window on an event
loop of the actor, so that the window is refilled row by row across batches. Each batch is returned in its
order: Ray Data's own retries find outputs by their position.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any

import uvloop

from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.journal.answer_cache import AnswerCache, cache_key
from penstock.data.pipeline.batch_columns import OUTCOME, REQUEST, Table, pack, unpack, user_columns
from penstock.data.pipeline.stage_spec import StageSpec
from penstock.data.results.outcome import Outcome
from penstock.processes import cpu_turns


class EngineStage:
    """Batch with REQUEST -> batch with OUTCOME."""

    def __init__(self, spec: StageSpec, retry_policy: RetryPolicy, journal: str | None) -> None:
        """Returns when the backend is ready. Raises: what the backend's `start` raises."""

        async def start() -> Window:
            cpu_turns.wait()
            backend = spec.make_backend()
            await backend.start()
            return Window(backend, retry_policy, exclusive=spec.exclusive, max_in_flight=spec.max_in_flight)

        self._spec = spec
        self._answers = AnswerCache(journal) if journal is not None else None
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="rows").start()
        self._window = self._wait(start())

    def __call__(self, batch: Table) -> Table:
        rows = [None] * len(batch) if self._answers is None else user_columns(batch).to_pylist()
        outcomes = self._wait(self._run(unpack(batch, REQUEST), unpack(batch, OUTCOME), rows))
        return batch.drop_columns([REQUEST, OUTCOME]).append_column(OUTCOME, pack(outcomes))

    async def _run(
        self, requests: list[Any], outcomes: list[Outcome | None], rows: list[Any]
    ) -> list[Outcome]:
        return await asyncio.gather(*map(self._outcome, requests, outcomes, rows))

    async def _outcome(self, request: Any, outcome: Outcome | None, row: Any) -> Outcome:
        if outcome is not None:
            return outcome
        run = partial(self._spec.run_row, self._window, request)
        if self._answers is None:
            return await run()
        return await self._answers.get_or_run(cache_key(request, row, self._spec.identity), run)

    def __del__(self) -> None:
        """How Ray Data ends an actor: the engine is stopped with it."""
        try:
            if self._answers is not None:
                self._answers.close()
            if hasattr(self, "_window"):  # it started
                self._wait(self._window.backend.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
