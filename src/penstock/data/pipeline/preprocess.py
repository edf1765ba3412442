"""The first step of a processor: the user's preprocessing of each row, and what it asks of the engine.

Stands before the engine's stage, in tasks or actors of its own. The user's columns pass through untouched;
ours lie beside them as bytes, which no table can merge. What fails here is the row's end, never the job's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import pyarrow as pa

from penstock.data.results.outcome import SKIPPED, Failure, Outcome, Stage, failed
from penstock.errors import BadRequest, ConfigError

log = logging.getLogger(__name__)

ASK = "__penstock_ask"
"""What the engine's stage is to ask, pickled; empty where the row has ended."""

SAID = "__penstock_said"
"""What preprocessing returned, pickled."""

END = "__penstock_end"
"""The row's outcome, pickled; empty while it has none."""

PACKED = "__penstock_row"
"""A row of a plain list, pickled."""

_OURS = "__penstock_"
"""How the names of our columns begin."""

_AT_A_TIME = 64
_logged: set[tuple[Stage, type[Exception]]] = set()
"""Kinds of failures that this process has logged."""

Row = dict[str, Any]
Table = Any
"""A `pyarrow.Table`; pyarrow has no types."""

Ask = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Of what preprocessing returned, and of the row: what crosses to the stage. Raises: BadRequest."""


class Batched:
    """Marks a function of many rows, `(list of rows) -> list of as many results`."""

    def __init__(self, function: Callable[[list[Row]], Sequence[Any]]) -> None:
        self.function = function

    def __call__(self, rows: list[Row]) -> Sequence[Any]:
        return self.function(rows)


def batched(function: Callable[[list[Row]], Sequence[Any]]) -> Batched:
    """Decorator: this preprocessing or postprocessing takes a list of rows and returns a list as long."""
    return Batched(function)


class Each:
    """The user's function over rows: of one row or many, plain or async. What it raises is its row's."""

    def __init__(self, function: Any, stage: Stage) -> None:
        self._function: Any = function() if inspect.isclass(function) else function
        self._stage: Stage = stage

    def __call__(self, rows: list[Row]) -> list[Any]:
        """A result or an Outcome for each row."""
        if isinstance(self._function, Batched):
            return self._batch(self._function, rows)
        if _is_async(self._function):
            return asyncio.run(self._side_by_side(rows))
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Any:
        try:
            return self._function(row)
        except Exception as error:
            return self._fault(error)

    def _batch(self, function: Batched, rows: list[Row]) -> list[Any]:
        try:
            results = list(function(rows))
        except Exception as error:
            return [self._fault(error) for _ in rows]
        if len(results) == len(rows):
            return results
        wrong = BadRequest(
            f"{len(results)} results for {len(rows)} rows; return one for each, in their order."
        )
        return [self._fault(wrong) for _ in rows]

    async def _side_by_side(self, rows: list[Row]) -> list[Any]:
        turn = asyncio.Semaphore(_AT_A_TIME)

        async def one(row: Row) -> Any:
            async with turn:
                try:
                    return await self._function(row)
                except Exception as error:
                    return self._fault(error)

        return await asyncio.gather(*(one(row) for row in rows))

    def _fault(self, error: Exception) -> Outcome:
        if (kind := (self._stage, type(error))) not in _logged:
            _logged.add(kind)
            log.warning(
                "A row failed in %s: %s: %s. Others that fail so say it in `error` only.",
                self._stage,
                type(error).__name__,
                error,
            )
        return fault(error, self._stage)


class Prepare:
    """Batch of rows -> the same, with ASK, SAID and END beside the user's columns."""

    def __init__(self, function: Any, ask: Ask, is_packed: bool = False) -> None:
        """is_packed: batches have one column, PACKED, which this driver wrote; else they are the user's."""
        self._each = Each(function, "preprocess") if function is not None else None
        self._ask = ask
        self._is_packed = is_packed

    def __call__(self, batch: Table) -> Table:
        """Raises: ConfigError when a column of the user's has a name like ours."""
        if not self._is_packed:
            _check_names(batch.column_names)
        rows = rows_of(batch, self._is_packed)
        said = self._each(rows) if self._each is not None else rows
        asked = [self._asked(fields, row) for fields, row in zip(said, rows, strict=True)]
        ends = [one if isinstance(one, Outcome) else None for one in asked]
        asks = [one if end is None else None for one, end in zip(asked, ends, strict=True)]
        kept = [fields if isinstance(fields, Mapping) else None for fields in said]
        for name, values in ((ASK, asks), (SAID, kept), (END, ends)):
            batch = batch.append_column(name, packed(values))
        return batch

    def _asked(self, fields: Any, row: Row) -> Any:
        if isinstance(fields, Outcome):
            return fields
        if fields is None:
            return SKIPPED
        if not isinstance(fields, Mapping):
            found = type(fields).__name__  # pyright: ignore[reportUnknownArgumentType]
            wrong = f"preprocess returned {found}; return a dict of fields, or None to skip the row."
            return fault(BadRequest(wrong), "preprocess")
        try:
            return self._ask(fields, row)  # pyright: ignore[reportUnknownArgumentType]
        except Exception as error:
            return fault(error, "preprocess")


def rows_of(batch: Table, is_packed: bool) -> list[Row]:
    """The user's rows in a batch. is_packed: in the column PACKED, which this driver wrote."""
    if is_packed:
        return [pickle.loads(row) for row in batch.column(PACKED).to_pylist()]
    ours = [name for name in batch.column_names if name.startswith(_OURS)]
    return batch.drop_columns(ours).to_pylist()


def users_columns(batch: Table) -> Table:
    """The batch without what our steps put beside the user's rows."""
    return batch.drop_columns([name for name in (ASK, SAID, END) if name in batch.column_names])


def _check_names(names: Sequence[str]) -> None:
    """Such columns are unpickled later, so a dataset must not bring its own. Raises: ConfigError."""
    if wrong := [name for name in names if name.startswith(_OURS)]:
        raise ConfigError(
            f"The dataset has the column '{wrong[0]}'. Names that begin with '{_OURS}' are reserved for the "
            "processor; rename or drop the column."
        )


def packed(values: list[Any]) -> Any:
    """A column of bytes: each value pickled, nothing for None."""
    return pa.array(
        [b"" if value is None else cloudpickle.dumps(value) for value in values], pa.large_binary()
    )


def unpacked(batch: Table, name: str) -> list[Any]:
    """What `packed` packed."""
    return [pickle.loads(value) if value else None for value in batch.column(name).to_pylist()]


def fault(error: Exception, stage: Stage) -> Outcome:
    """The end of a row that `error` broke."""
    return failed(Failure.from_error(error, stage))


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
