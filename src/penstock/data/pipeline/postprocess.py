"""The last step of a processor: each answer's columns beside the user's, and the user's postprocessing.

Stands after the engine's stage, in tasks or actors of its own. A failed row goes past postprocessing, with
what the user put in and with `error`; so does one that postprocessing itself breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from penstock.data.pipeline.preprocess import END, PACKED, SAID, Each, Row, Table, fault, rows_of, unpacked
from penstock.data.results.merge import merge, row_view
from penstock.data.results.outcome import Outcome
from penstock.errors import BadRequest, Error

Columns = Callable[[Outcome, Mapping[str, Any]], dict[str, Any]]
"""Of an outcome and what preprocessing returned: the columns of the answer, `error` among them."""

Names = Callable[[Mapping[str, Any]], set[str]]
"""Of what preprocessing returned: the names that are the request."""

ERROR = "error"


class RowFailed(Error):
    """A row failed, and the pipeline was told not to go on then."""

    code = "row_failed"


class Finish:
    """Batch with SAID and END -> what comes out of the pipeline."""

    def __init__(
        self, function: Any, columns: Columns, names: Names, go_on: bool, is_packed: bool = False
    ) -> None:
        self._each = Each(function, "postprocess") if function is not None else None
        self._columns = columns
        self._names = names
        self._go_on = go_on
        self._is_packed = is_packed

    def __call__(self, batch: Table) -> dict[str, Any]:
        rows, said, ends = rows_of(batch, self._is_packed), unpacked(batch, SAID), unpacked(batch, END)
        views = [self._view(*each) for each in zip(rows, said, ends, strict=True)]
        results = self._processed(views, ends)
        finished = [self._finished(*each) for each in zip(rows, views, ends, results, strict=True)]
        if not self._go_on:
            _all_ok(finished)
        if self._is_packed:
            return {PACKED: np.array([cloudpickle.dumps(row) for row in finished], dtype=object)}
        return _as_columns(finished)

    def _view(self, row: Row, said: Row | None, end: Outcome) -> Row:
        fields = said or {}
        names = self._names(fields)
        extras = {name: value for name, value in fields.items() if name not in names}
        request = {name: fields[name] for name in names}
        return row_view(row, extras, request, self._columns(end, fields))

    def _processed(self, views: list[Row], ends: list[Outcome]) -> list[Any]:
        """What postprocessing made of each row that is ok; None for the others."""
        if self._each is None:
            return list(views)
        good = [n for n, end in enumerate(ends) if end.state == "ok"]
        results: list[Any] = [None] * len(views)
        for n, result in zip(good, self._each([views[n] for n in good]), strict=True):
            results[n] = result
        return results

    def _finished(self, row: Row, whole: Row, end: Outcome, result: Any) -> Row:
        if end.state != "ok":
            return self._unanswered(whole, end)
        if isinstance(result, Outcome):
            return self._broken(row, result)
        if not isinstance(result, Mapping):
            found = type(result).__name__
            wrong = BadRequest(f"postprocess returned {found}; return a dict of columns.")
            return self._broken(row, fault(wrong, "postprocess"))
        own: Row = {**result}
        return merge(own, {ERROR: None}) if own.get(ERROR) is not None else {**own, ERROR: None}

    def _unanswered(self, whole: Row, end: Outcome) -> Row:
        """Without the answer's columns, all empty, where postprocessing gives other rows its own."""
        if self._each is None:
            return {**whole}
        empty = self._columns(end, {}).keys() - {ERROR}
        return {name: value for name, value in whole.items() if name not in empty}

    def _broken(self, row: Row, end: Outcome) -> Row:
        return {**row_view(row, {}, {}, {ERROR: self._columns(end, {})[ERROR]})}


class Typed:
    """Batch of what came out -> the same, with our columns of their own types where no row has a value."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def __call__(self, batch: Table) -> Table:
        for field in self._schema:
            index = batch.schema.get_field_index(field.name)
            if index >= 0 and pa.types.is_null(batch.schema.field(index).type):
                batch = batch.set_column(index, field, batch.column(index).cast(field.type))
        return batch


def _as_columns(rows: list[Row]) -> dict[str, Any]:
    """One column for each name that any row has; None where a row has not."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    for n, value in enumerate(values):
        column[n] = value
    return column


def _all_ok(rows: list[Row]) -> None:
    failure: Mapping[str, Any] | None = next((row[ERROR] for row in rows if row[ERROR] is not None), None)
    if failure is not None:
        raise RowFailed(
            f"A row failed in {failure['stage']}: {failure['message']} (should_continue_on_error=True "
            "keeps such rows, with the reason in `error`.)"
        )
