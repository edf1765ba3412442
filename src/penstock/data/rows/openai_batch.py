"""A line of an OpenAI batch file as a request: its body is sent as it is, to any endpoint that takes JSON."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec

from penstock.data.rows.coerce import invalid_field, parse_json, to_json, truncate, type_name
from penstock.data.rows.request import RowRequest
from penstock.openai.paths import BATCH_PATHS

_encode = msgspec.json.Encoder().encode


def parse_batch_line(line: Mapping[str, Any], own_paths: Collection[str] = ()) -> RowRequest:
    """The request of `{custom_id, method, url, body}`. Reads no file that it names, adds no field.

    own_paths: endpoints beyond `BATCH_PATHS`.
    Raises: BadRequest naming what is wrong.
    """
    method, url = line.get("method"), line.get("url")
    if method is not None and method != "POST":
        raise invalid_field("method", f"is {truncate(repr(method))}; it must be POST")
    if not isinstance(url, str) or (url not in BATCH_PATHS and url not in own_paths):
        close = difflib.get_close_matches(str(url), BATCH_PATHS, 1)
        ask = f"did you mean {close[0]}?" if close else "there are"
        raise invalid_field(
            "url", f"is {truncate(repr(url))}, which is not a batch endpoint; {ask} {', '.join(BATCH_PATHS)}"
        )
    body = parse_json(line.get("body"), "body")
    if not isinstance(body, Mapping):
        raise invalid_field("body", f"is {type_name(body)}; it must be a JSON object, the endpoint's request")
    fields = cast("dict[str, Any]", to_json(body, "body"))
    model = fields.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise invalid_field("body.model", f"is {type_name(model)}; it must be a string")
    if fields.pop("stream", None):
        raise invalid_field("body.stream", "asks for a stream, but batch lines do not stream; leave it out")
    if fields.get("background"):
        raise invalid_field(
            "body.background", "asks to answer later, which a batch does anyway; leave it out"
        )
    return RowRequest(path=url, body=_encode(fields), model=model)
