"""Which of a row's columns are its request, by task. Misspelt ones are refused, others stay the row's own.

A line of an OpenAI batch file is a request by itself: its body is sent as it is, to any endpoint of JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import msgspec

from penstock.data.rows.coerce import invalid_field, parse_json, to_json, truncate, type_name
from penstock.data.rows.parameters import (
    ALIASES,
    GROUPS,
    PARAMETERS,
    closest_parameter,
    nearest_parameter,
    read_parameters,
)
from penstock.data.rows.request import KINDS, Kind, RowRequest, Task
from penstock.errors import BadRequest
from penstock.openai.paths import BATCH_PATHS

IDS = ("prompt_token_ids", "tokenized_prompt")
MEDIA = {
    "multimodal_data": "multi_modal_data",
    "multi_modal_data": "multi_modal_data",
    "multimodal_uuids": "multi_modal_uuids",
    "multi_modal_uuids": "multi_modal_uuids",
    "prompt_embeds": "prompt_embeds",
}
"""Fields beside a prompt that only the engine understands, and its names for them."""

INPUTS: Mapping[Kind, tuple[str, ...]] = {
    "generate": ("messages", "prompt", *IDS, *MEDIA),
    "embed": ("input", "messages", "prompt", *IDS),
    "classify": ("input", "messages", "prompt", *IDS),
    "score": ("text_1", "text_2", "query", "queries", "document", "documents"),
}
_ALWAYS = ("model", "adapter", "extra_body", "stream")
_POOLED = "`input` (or `prompt`, `messages`, `prompt_token_ids`)"
REQUIRED_INPUT: Mapping[Kind, str] = {
    "generate": "`messages`, `prompt` or `prompt_token_ids`",
    "embed": _POOLED,
    "classify": _POOLED,
    "score": "`text_1` and `text_2` (or `query` and `documents`)",
}
"""The columns that a row must have, in words."""

_LINE = ("custom_id", "url", "body")


_KNOWN = {
    kind: frozenset({*INPUTS[kind], *_ALWAYS, *GROUPS[kind], *PARAMETERS[kind], *ALIASES}) for kind in KINDS
}


def request_columns(names: Iterable[str], task: Task) -> set[str]:
    """The columns of a row that are its request."""
    given = set(names)
    if is_batch_line(given):
        return given & {*_LINE, "method"}
    return given & _KNOWN[task.kind]


def is_batch_line(names: Iterable[str]) -> bool:
    """Whether a row with these columns is a line of an OpenAI batch file."""
    return set(_LINE).issubset(names)


def check_columns(fields: Mapping[str, Any], kind: Kind) -> None:
    """Raises: BadRequest when a name looks misspelt, or when no column is an input."""
    odd = [name for name in fields if name not in _KNOWN[kind]]
    for name in odd:
        if (meant := closest_parameter(str(name), kind)) and meant not in fields:
            raise invalid_field(str(name), f"is not known: did you mean {meant}?")
    if any(fields.get(name) is not None for name in INPUTS[kind]):
        return
    for name in odd:
        if close := difflib.get_close_matches(str(name), INPUTS[kind], 1, 0.8):
            raise invalid_field(str(name), f"is not known: did you mean {close[0]}?")
    nulls = [f"its {name} is null" for name in INPUTS[kind] if name in fields]
    there = f"it has {truncate(', '.join(map(str, fields)) or 'nothing')}"
    raise BadRequest(f"The row has no {REQUIRED_INPUT[kind]}; {[*nulls, there][0]}.", param=INPUTS[kind][0])


def check_defaults(defaults: Mapping[str, Any], kind: Kind) -> None:
    """Raises: BadRequest for a field of all rows that no request has, or whose value does not fit."""
    for name in defaults:
        if name not in _KNOWN[kind]:
            raise invalid_field(name, f"is not known{nearest_parameter(name, kind)}")
    read_parameters(defaults, kind)


def parse_batch_line(line: Mapping[str, Any], own_paths: Collection[str]) -> RowRequest:
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
    return RowRequest(path=url, body=msgspec.json.encode(fields), model=model)
