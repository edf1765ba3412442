"""Sampling parameters for SGLang: by OpenAI's or vLLM's names, or by SGLang's own.

Nothing is dropped silently: SGLang's HTTP ignores unknown fields, so they are rejected here by name. Knows
neither HTTP nor the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from penstock.errors import BadRequest

_COUNTS = ("max_tokens", "max_completion_tokens", "n")
_FORMS = {"regex": "regex", "grammar": "ebnf"}

_IDLE = {"bad_words": [], "allowed_token_ids": None, "detokenize": True, "use_beam_search": False}
"""vLLM parameters that SGLang lacks, with the values that have no effect."""

_NOT_OBEYED = ("best_of", "suffix")
_WITHOUT_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"}
    | {"user"}
)
"""OpenAI's fields that change no token."""


def in_body(fields: Mapping[str, Any], known: frozenset[str], *, seeds: bool) -> dict[str, Any]:
    """The body of a chat or a completion as SGLang obeys it. known: fields that its endpoint has.

    Raises: BadRequest.
    """
    given = _given(fields, seeds=seeds)
    for name in _NOT_OBEYED:
        if given.get(name) is not None:
            raise _unknown(name)
    if given.get("parallel_tool_calls") is False:
        raise BadRequest("SGLang cannot limit an answer to one tool call.", param="parallel_tool_calls")
    if "include_stop_str_in_output" in given:
        given["no_stop_trim"] = given.pop("include_stop_str_in_output")
    if (form := given.pop("structured_outputs", None)) is not None:
        given |= _form(form)
    for name in [name for name in given if name not in known]:
        if name not in _WITHOUT_EFFECT:
            raise _unknown(name)
        del given[name]
    return given


def _given(params: Mapping[str, Any], *, seeds: bool) -> dict[str, Any]:
    """The values set: without nulls, and without values that have no effect."""
    given = {
        name: value
        for name, value in params.items()
        if value is not None and not (name in _IDLE and value == _IDLE[name])
    }
    for name in _COUNTS:
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise BadRequest(f"{name} must be an integer of at least 1.", param=name)
    if given.get("temperature") == 0:
        given.pop("seed", None)  # nothing is drawn
    if "seed" in given and not seeds:
        raise BadRequest(
            "SGLang obeys a seed only where the engine was started with `enable_deterministic_inference`; "
            "set that in engine_kwargs, or leave the seed out.",
            param="seed",
        )
    if given.get("top_k") == 0:  # vLLM's "all", as -1
        given["top_k"] = -1
    return given


def _form(form: Any) -> dict[str, Any]:
    """vLLM's `structured_outputs` as fields of a body: chats have none for a schema alone."""
    if not isinstance(form, Mapping):
        raise BadRequest("structured_outputs must be an object.", param="structured_outputs")
    wanted = {
        name: value for name, value in cast("Mapping[str, Any]", form).items() if value not in (None, False)
    }
    if len(wanted) != 1:
        raise BadRequest("structured_outputs must name one form.", param="structured_outputs")
    ((name, value),) = wanted.items()
    if name in _FORMS:
        return {_FORMS[name]: value if isinstance(value, str) else msgspec.json.encode(value).decode()}
    if name == "choice":
        return {"regex": "|".join(re.escape(str(choice)) for choice in value)}
    if name == "structural_tag":
        return {"response_format": _decoded(value)}
    if name not in ("json", "json_object"):
        raise BadRequest(f"SGLang has no structured output '{name}'.", param="structured_outputs")
    schema = {"type": "object"} if name == "json_object" else _decoded(value)
    named = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _decoded(value: Any) -> Any:
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise BadRequest(f"structured_outputs is not JSON: {error}.", param="structured_outputs") from error


def _unknown(name: str) -> BadRequest:
    return BadRequest(f"SGLang has no parameter '{name}'.", param=name)
