"""The user's preprocessing or postprocessing: a function of one row or of many, plain or async.

An exception that it raises fails its row, never the pipeline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from penstock.data.pipeline.batch_columns import Row
from penstock.data.results.outcome import Failure, Outcome, Stage, failed
from penstock.errors import BadRequest

log = logging.getLogger(__name__)

_MAX_CONCURRENT = 64
"""Calls of an async function at a time."""

_logged: set[tuple[Stage, type[Exception]]] = set()
"""Kinds of failures that this process has logged."""


class Batched:
    """Decorator: this preprocessing or postprocessing takes a list of rows and returns a list as long."""

    def __init__(self, function: Callable[[list[Row]], Sequence[Any]]) -> None:
        self.function = function

    def __call__(self, rows: list[Row]) -> Sequence[Any]:
        return self.function(rows)


batched = Batched


class UserFunction:
    """The function, or an object of a class, as `list of rows -> list of results`."""

    def __init__(self, function: Any, stage: Stage) -> None:
        self._function: Any = function() if inspect.isclass(function) else function
        self._stage: Stage = stage

    def __call__(self, rows: list[Row]) -> list[Any]:
        """A result or an Outcome for each row."""
        if isinstance(self._function, Batched):
            return self._batch(self._function, rows)
        calls = self._function, type(self._function).__call__
        if any(map(inspect.iscoroutinefunction, calls)):
            return asyncio.run(self._concurrently(rows))
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Any:
        try:
            return self._function(row)
        except Exception as error:
            return self._failed(error)

    def _batch(self, function: Batched, rows: list[Row]) -> list[Any]:
        try:
            results = list(function(rows))
        except Exception as error:
            return [self._failed(error) for _ in rows]
        if len(results) == len(rows):
            return results
        wrong = BadRequest(
            f"{len(results)} results for {len(rows)} rows; return one for each, in their order."
        )
        return [self._failed(wrong) for _ in rows]

    async def _concurrently(self, rows: list[Row]) -> list[Any]:
        limit = asyncio.Semaphore(_MAX_CONCURRENT)

        async def one(row: Row) -> Any:
            async with limit:
                try:
                    return await self._function(row)
                except Exception as error:
                    return self._failed(error)

        return await asyncio.gather(*(one(row) for row in rows))

    def _failed(self, error: Exception) -> Outcome:
        if (kind := (self._stage, type(error))) not in _logged:
            _logged.add(kind)
            log.warning(
                "A row failed in %s: %s: %s. Further failures of this kind are only in `error`.",
                self._stage,
                type(error).__name__,
                error,
            )
        return failed(Failure.from_error(error, self._stage))
