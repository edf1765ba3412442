"""Sampling and other parameters of a row, under OpenAI's, vLLM's and older names, as fields of the body.

They come in `sampling_params` or as separate fields. Only names and types are checked here; the engine checks
values, such as a temperature that is too high.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from penstock.data.rows.coerce import expect, invalid_field, parse_json, to_dict, truncate
from penstock.data.rows.request import CHAT, COMPLETIONS, KINDS, Kind
from penstock.openai import parameters

Fields = dict[str, Any]

_POOLING = {
    "dimensions": "whole",
    "truncate_prompt_tokens": "whole",
    "truncation_side": "text",
    "use_activation": "bool",
    "add_special_tokens": "bool",
    "priority": "whole",
    "cache_salt": "text",
    "chat_template": "text",
    "chat_template_kwargs": "object",
    "mm_processor_kwargs": "object",
}

PARAMETERS: Mapping[Kind, Mapping[str, str]] = {
    **dict.fromkeys(KINDS, _POOLING),
    "generate": parameters.GENERATING,
}
"""Parameters that a row may set, with their types."""

CHAT_ONLY = frozenset(parameters.CHAT)
COMPLETIONS_ONLY = frozenset(parameters.COMPLETIONS) - {"echo"}

GROUPS: Mapping[Kind, tuple[str, ...]] = {
    **dict.fromkeys(KINDS, ("pooling_params", "tokenization_kwargs")),
    "generate": ("sampling_params", "tokenization_kwargs"),
}
"""Fields that hold parameters."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "guided_decoding": "structured_outputs",
    **{f"guided_{form}": form for form in _FORMS},
}
_RENAMED_IN_GROUPS = {"extra_args": "vllm_xargs", "activation": "use_activation"}
_IGNORED = {
    "detokenize",  # responses always have their text
    "output_kind",
    "flat_logprobs",
    "skip_clone",
    "stream_interval",
    "stream_options",
    "encoding_format",
    "task",
}
ALIASES = frozenset(_RENAMED)
"""Names from older versions and other engines that a row may use."""

_IN_GROUPS = ALIASES | _RENAMED_IN_GROUPS.keys() | _IGNORED | {"stream"}


def read_parameters(fields: Mapping[str, Any], kind: Kind) -> Fields:
    """The parameters in `fields`, under their names in bodies. None means unset, at this level only.

    Raises: BadRequest.
    """
    found: Fields = {}
    for group in GROUPS[kind]:
        for name, value in to_dict(fields.get(group), group).items():
            if name not in PARAMETERS[kind] and name not in _IN_GROUPS:
                raise invalid_field(f"{group}.{name}", f"is not known{nearest_parameter(name, kind)}")
            _set(found, name, value, f"{group}.{name}", kind)
    for name in fields:
        if name in PARAMETERS[kind] or name in ALIASES or name == "stream":
            _set(found, name, fields[name], name, kind)
    return found


def for_endpoint(given: Fields, path: str, prepared: bool) -> Fields:
    """The same under the endpoint's names and types, without those that it does not have.

    prepared: the engine prompt already contains the media and their options.
    """
    without = {"mm_processor_kwargs", "media_io_kwargs"} if prepared else set[str]()
    if path == CHAT:
        return _without(_chat_logprobs(given), without | COMPLETIONS_ONLY)
    if path == COMPLETIONS:
        return _without(_completions(given), without | CHAT_ONLY)
    return given


def _without(given: Fields, names: AbstractSet[str]) -> Fields:
    return {name: value for name, value in given.items() if name not in names}


@lru_cache(maxsize=1024)  # rows share their columns, and comparing names would dominate the time per row
def closest_parameter(name: str, kind: Kind) -> str | None:
    """The parameter that a column's name probably misspells; None for other names."""
    known = [known for known in (*PARAMETERS[kind], *GROUPS[kind]) if len(known) > 5]
    found = difflib.get_close_matches(name, known, 1, 0.9) if len(name) > 5 else []
    return found[0] if found else None


def _set(found: Fields, name: str, value: Any, where: str, kind: Kind) -> None:
    if name == "stream" and value is not None and value is not False:
        raise invalid_field(where, "asks for a stream, but rows do not stream; leave it out")
    if value is None or name == "stream" or name in _IGNORED:
        return
    name, value = _renamed(name, value, where)
    wanted = PARAMETERS[kind].get(name, "any")
    if isinstance(value, str) and not value and wanted != "text":  # an empty cell of a CSV file
        return
    value = expect(value, where, wanted)
    if name in found and found[name] != value:
        raise invalid_field(
            where,
            f"is given twice, as {truncate(repr(found[name]))} and as {truncate(repr(value))}; give it once",
        )
    found[name] = value


def _renamed(name: str, value: Any, where: str) -> tuple[str, Any]:
    renamed = _RENAMED.get(name) or _RENAMED_IN_GROUPS.get(name, name)
    if renamed in _FORMS:
        return "structured_outputs", {renamed: parse_json(value, where) if renamed == "json" else value}
    if renamed == "response_format" and isinstance(value, type):
        schema = {"name": value.__name__, "schema": value}
        return renamed, {"type": "json_schema", "json_schema": schema}
    return renamed, value


def nearest_parameter(name: str, kind: Kind) -> str:
    """How a sentence about an unknown name goes on: with the one that was probably meant, or with all."""
    known = list(PARAMETERS[kind])
    found = difflib.get_close_matches(name, known, 1)
    if found:
        return f": did you mean {found[0]}? `extra_body` sends any field as it is"
    return f"; known are {', '.join(sorted(known))}; `extra_body` sends any field as it is"


def _chat_logprobs(given: Fields) -> Fields:
    """In vLLM `logprobs` is a number, in a chat a boolean."""
    logprobs = given.get("logprobs")
    if logprobs is None or isinstance(logprobs, bool):
        return given
    return given | {"logprobs": True, "top_logprobs": given.get("top_logprobs", logprobs)}


def _completions(given: Fields) -> Fields:
    """In a completion `logprobs` is a number."""
    rest = {
        name: value for name, value in given.items() if name not in ("top_logprobs", "max_completion_tokens")
    }
    if "max_completion_tokens" in given:
        rest["max_tokens"] = given["max_completion_tokens"]
    if given.get("logprobs") is True:
        rest["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("logprobs") is False:
        del rest["logprobs"]
    return rest
