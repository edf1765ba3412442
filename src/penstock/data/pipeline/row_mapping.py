"""How a row becomes a request, and its outcome columns, for each kind of backend.

Functions for the fields of `StageSpec`, each with the stage's task first. `fields` is what preprocessing
returned; `row` is what it was given.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from penstock.data.backends.openai_service import PAYLOAD
from penstock.data.backends.serve_handle import method_call
from penstock.data.results.columns import common_columns, result_columns
from penstock.data.results.outcome import Outcome
from penstock.data.rows import form
from penstock.data.rows.builder import build_request
from penstock.data.rows.coerce import to_json
from penstock.data.rows.input_columns import is_batch_line, request_columns
from penstock.data.rows.request import RowRequest, Task
from penstock.errors import BadRequest

Fields = Mapping[str, Any]


def model_request(
    task: Task, fields: Fields, row: Fields, defaults: Mapping[str, Any] | None = None
) -> RowRequest:
    """The request in `fields`, without columns that preprocessing only passed through.

    defaults: fields of rows that do not set them.
    Raises: BadRequest.
    """
    ours = request_columns(fields, task)
    own = {name: fields[name] for name in fields if name in ours or name not in row}
    return build_request(own, task, defaults)


def prompt_request(
    task: Task, fields: Fields, row: Fields, defaults: Mapping[str, Any] | None = None
) -> RowRequest:
    """The same; a prompt wins over the messages that it was made of."""
    if fields.get("prompt") is not None:
        fields = {name: value for name, value in fields.items() if name != "messages"}
    return model_request(task, fields, row, defaults)


def call_or_request(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """A row with a `method` calls it. Raises: BadRequest."""
    if not _is_call(fields):
        return model_request(task, fields, row)
    kwargs = fields.get("request_kwargs")
    if not isinstance(kwargs, Mapping):
        raise BadRequest("A row with a `method` needs `request_kwargs`, a dict.", param="request_kwargs")
    return method_call(str(fields["method"]), cast("Fields", kwargs), fields.get("dtype"))


def call_or_model_columns(task: Task, outcome: Outcome, fields: Fields) -> dict[str, Any]:
    """Of a call: what the method returned; for a model's own endpoints, the usual columns as well."""
    if not _is_call(fields):
        return result_columns(task, outcome)
    returned = {} if outcome.state != "ok" else msgspec.json.decode(outcome.body, type=dict[str, Any])
    if fields["method"] in ("chat", "completions") and "choices" in returned:
        return {**returned, **result_columns(task, outcome)}
    return {**returned, **common_columns(outcome)}


def call_or_request_fields(task: Task, fields: Fields) -> set[str]:
    if not _is_call(fields):
        return request_columns(fields, task)
    return {name for name in ("method", "dtype", "request_kwargs") if name in fields}


def _is_call(fields: Fields) -> bool:
    return "method" in fields and not is_batch_line(fields)


def payload_or_request(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """A payload is sent as it is, one with files as a form. Raises: BadRequest."""
    if "payload" not in fields:
        return model_request(task, fields, row)
    payload = fields["payload"]
    if form.is_form(payload):
        return RowRequest(path=PAYLOAD, body=b"{}", prompt=pickle.dumps(form.checked(payload)))
    return RowRequest(path=PAYLOAD, body=msgspec.json.encode(to_json(payload, "payload")))


def payload_or_model_columns(task: Task, outcome: Outcome, fields: Fields) -> dict[str, Any]:
    if "payload" not in fields:
        return result_columns(task, outcome)
    response = None if outcome.state != "ok" else msgspec.json.decode(outcome.body)
    return {"http_response": response, **common_columns(outcome)}


def payload_or_request_fields(task: Task, fields: Fields) -> set[str]:
    return {"payload"} if "payload" in fields else request_columns(fields, task)
