"""The first stage of a processor: the user's preprocessing of each row, and the request made of its result.

Runs before the engine stage, in separate tasks or actors. An exception here fails the row, never the
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.data.pipeline.batch_columns import (
    FIELDS,
    OUTCOME,
    REQUEST,
    Row,
    Table,
    check_names,
    pack,
    user_rows,
)
from penstock.data.pipeline.user_function import UserFunction
from penstock.data.results.outcome import SKIPPED, Failure, Outcome, failed
from penstock.errors import BadRequest

BuildRequest = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""From what preprocessing returned and the row, what the engine stage runs. Raises: BadRequest."""


class Preprocess:
    """Batch of rows -> the same, with REQUEST, FIELDS and OUTCOME beside the user's columns."""

    def __init__(self, function: Any, build_request: BuildRequest, is_packed: bool = False) -> None:
        """is_packed: batches have one column, ROW, which this driver wrote; else the user's columns."""
        self._function = UserFunction(function, "preprocess") if function is not None else None
        self._build_request = build_request
        self._is_packed = is_packed

    def __call__(self, batch: Table) -> Table:
        """Raises: ConfigError when a column of the user's has a reserved name."""
        if not self._is_packed:
            check_names(batch.column_names)
        rows = user_rows(batch, self._is_packed)
        returned = self._function(rows) if self._function is not None else rows
        built = [self._built(fields, row) for fields, row in zip(returned, rows, strict=True)]
        outcomes = [one if isinstance(one, Outcome) else None for one in built]
        requests = [one if outcome is None else None for one, outcome in zip(built, outcomes, strict=True)]
        fields = [one if isinstance(one, Mapping) else None for one in returned]
        for name, values in ((REQUEST, requests), (FIELDS, fields), (OUTCOME, outcomes)):
            batch = batch.append_column(name, pack(values))
        return batch

    def _built(self, fields: Any, row: Row) -> Any:
        """The row's request, or the outcome of a row that has none."""
        if isinstance(fields, Outcome):
            return fields
        if fields is None:
            return SKIPPED
        try:
            if not isinstance(fields, Mapping):
                found = type(fields).__name__  # pyright: ignore[reportUnknownArgumentType]
                raise BadRequest(
                    f"preprocess returned {found}; return a dict of fields, or None to skip the row."
                )
            return self._build_request(fields, row)  # pyright: ignore[reportUnknownArgumentType]
        except Exception as error:
            return failed(Failure.from_error(error, "preprocess"))
