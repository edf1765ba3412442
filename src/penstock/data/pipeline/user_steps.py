"""The first and the last stage of a processor: the user's preprocessing, with the request made of its result;
and result columns beside the user's, with the user's postprocessing.

They run before and after the engine stage, in separate tasks or actors. An exception here fails the row,
never the pipeline. A failed row skips postprocessing and keeps the user's columns, with `error`; so does a
row that postprocessing itself breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from penstock.data.pipeline.batch_columns import (
    FIELDS,
    OUTCOME,
    REQUEST,
    ROW,
    Row,
    Table,
    check_names,
    pack,
    unpack,
    user_rows,
)
from penstock.data.pipeline.user_function import UserFunction
from penstock.data.results.merge import merge, row_view
from penstock.data.results.outcome import SKIPPED, Failure, Outcome, failed
from penstock.errors import BadRequest, Error

Fields = Mapping[str, Any]

ERROR = "error"

INFERENCE_ERROR = "__inference_error__"
"""What Ray's programs look at: the message of `error`, "" for a row that is ok."""


class RowFailed(Error):
    """A row failed, and `should_continue_on_error` is false."""

    code = "row_failed"


class Preprocess:
    """Batch of rows -> the same, with REQUEST, FIELDS and OUTCOME beside the user's columns."""

    def __init__(
        self, function: Any, build_request: Callable[[Fields, Fields], Any], is_packed: bool = False
    ) -> None:
        """build_request: see `StageSpec`. is_packed: batches have only the column ROW, of this driver's."""
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


@dataclass(eq=False)
class Postprocess:
    """Batch with FIELDS and OUTCOME -> the pipeline's output.

    columns, request_fields: see `StageSpec`. names_failures: whether each row gets INFERENCE_ERROR.
    """

    function: Any
    columns: Callable[[Outcome, Fields], dict[str, Any]]
    request_fields: Callable[[Fields], set[str]]
    continue_on_error: bool
    is_packed: bool = False
    names_failures: bool = False

    def __post_init__(self) -> None:
        self._function = UserFunction(self.function, "postprocess") if self.function is not None else None

    def __call__(self, batch: Table) -> dict[str, Any]:
        rows, outcomes = user_rows(batch, self.is_packed), unpack(batch, OUTCOME)
        views = [self._view(*one) for one in zip(rows, unpack(batch, FIELDS), outcomes, strict=True)]
        results = self._processed(views, outcomes)
        output = [self._output(*one) for one in zip(rows, views, outcomes, results, strict=True)]
        if not self.continue_on_error:
            _check_all_ok(output)
        if self.names_failures:
            output = [{**row, INFERENCE_ERROR: (row[ERROR] or {}).get("message", "")} for row in output]
        if self.is_packed:
            return {ROW: np.array([cloudpickle.dumps(row) for row in output], dtype=object)}
        return _as_columns(output)

    def _view(self, row: Row, returned: Row | None, outcome: Outcome) -> Row:
        fields = returned or {}
        names = self.request_fields(fields)
        extras = {name: value for name, value in fields.items() if name not in names}
        request = {name: fields[name] for name in names}
        return row_view(row, extras, request, self.columns(outcome, fields))

    def _processed(self, views: list[Row], outcomes: list[Outcome]) -> list[Any]:
        """What postprocessing made of each row that is ok; None for the others."""
        if self._function is None:
            return list(views)
        good = [n for n, outcome in enumerate(outcomes) if outcome.state == "ok"]
        results: list[Any] = [None] * len(views)
        for n, result in zip(good, self._function([views[n] for n in good]), strict=True):
            results[n] = result
        return results

    def _output(self, row: Row, view: Row, outcome: Outcome, result: Any) -> Row:
        if outcome.state != "ok":
            return self._unanswered(view, outcome)
        if isinstance(result, Outcome):
            return self._failed(row, result)
        if not isinstance(result, Mapping):
            found = type(result).__name__
            wrong = BadRequest(f"postprocess returned {found}; return a dict of columns.")
            return self._failed(row, failed(Failure.from_error(wrong, "postprocess")))
        own: Row = {**result}
        return merge(own, {ERROR: None}) if own.get(ERROR) is not None else {**own, ERROR: None}

    def _unanswered(self, view: Row, outcome: Outcome) -> Row:
        """With a postprocess function other rows lack the result columns, all empty here: drop them."""
        if self._function is None:
            return {**view}
        columns = self.columns(outcome, {}).items()
        dropped = {name for name, value in columns if value is None or outcome.state == "failed"} - {ERROR}
        return {name: value for name, value in view.items() if name not in dropped}

    def _failed(self, row: Row, outcome: Outcome) -> Row:
        return {**row_view(row, {}, {}, {ERROR: self.columns(outcome, {})[ERROR]})}


class CastEmptyColumns:
    """Batch of the output -> the same, with result columns in which no row has a value cast to their type."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def __call__(self, batch: Table) -> Table:
        for field in self._schema:
            index = batch.schema.get_field_index(field.name)
            if index >= 0 and pa.types.is_null(batch.schema.field(index).type):
                batch = batch.set_column(index, field, batch.column(index).cast(field.type))
        return batch


def _as_columns(rows: list[Row]) -> dict[str, Any]:
    """One column for each name in any row; None for rows without it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.fromiter((row.get(name) for row in rows), object, len(rows)) for name in names}


def _check_all_ok(rows: list[Row]) -> None:
    failure: Mapping[str, Any] | None = next((row[ERROR] for row in rows if row[ERROR] is not None), None)
    if failure is not None:
        raise RowFailed(
            f"A row failed in {failure['stage']}: {failure['message']} (should_continue_on_error=True "
            "keeps such rows, with the reason in `error`.)"
        )
