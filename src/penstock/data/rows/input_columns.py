"""Which of a row's columns are its request, by task. Misspelt ones are refused, others stay the row's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.data.rows.coerce import invalid_field, truncate
from penstock.data.rows.parameters import (
    ALIASES,
    GROUPS,
    PARAMETERS,
    closest_parameter,
    nearest_parameter,
    read_parameters,
)
from penstock.data.rows.request import KINDS, Kind, Task
from penstock.errors import BadRequest

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
_WANTED: Mapping[Kind, str] = {
    "generate": "`messages`, `prompt` or `prompt_token_ids`",
    "embed": _POOLED,
    "classify": _POOLED,
    "score": "`text_1` and `text_2` (or `query` and `documents`)",
}
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


def required_input(kind: Kind) -> str:
    """The columns that a row must have, in words."""
    return _WANTED[kind]


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
    raise BadRequest(f"The row has no {_WANTED[kind]}; {[*nulls, there][0]}.", param=INPUTS[kind][0])


def check_defaults(defaults: Mapping[str, Any], kind: Kind) -> None:
    """Raises: BadRequest for a field of all rows that no request has, or whose value does not fit."""
    for name in defaults:
        if name not in _KNOWN[kind]:
            raise invalid_field(name, f"is not known{nearest_parameter(name, kind)}")
    read_parameters(defaults, kind)
