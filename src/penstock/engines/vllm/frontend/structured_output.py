"""Explains to the client in one sentence what is wrong with a schema, regex, grammar or structural tag.

vLLM checks them with xgrammar before the engine sees them, but hides xgrammar's reason, or shows it with
lines of xgrammar's source. Importing this file imports vLLM.

Work-around for vLLM 0.32. Remove when its errors say what xgrammar refused, without xgrammar's source lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import backend_xgrammar

from penstock.engines.vllm.frontend import limits

_check: Callable[[SamplingParams], None] = backend_xgrammar.validate_xgrammar_grammar
_check_tag: Callable[..., None] = protocol.validate_structural_tag_payload
_is_beyond = backend_xgrammar.has_xgrammar_unsupported_json_features

_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_PREFIX = re.compile(r"^Invalid structural tag error: ")


def tell_reasons() -> None:
    """Makes vLLM's checks give the reason from now on."""
    backend_xgrammar.validate_xgrammar_grammar = check
    protocol.validate_structural_tag_payload = check_tag


def verify_messages(state: Any) -> None:
    """Verifies up front for vLLM's Messages endpoint, whose streams turn every error into the same one."""
    serving = getattr(state, "anthropic_serving_messages", None)
    limits.before(
        state,
        "anthropic_serving_messages",
        "create_chat_completion",
        lambda request: verify(serving, request) if request.stream else None,
    )


def verify(serving: Any, request: Any) -> None:
    """Verifies the request's parameters as the engine would. Raises: what the engine would raise."""
    params = request.to_sampling_params(1, serving.default_sampling_params)
    config = serving.engine_client.vllm_config
    limits.check_words(params)
    params.verify(
        config.model_config,
        config.speculative_config,
        config.structured_outputs_config,
        serving.renderer.get_tokenizer(),
    )


def check(params: SamplingParams) -> None:
    """As vLLM's check. Raises: VLLMValidationError with the reason."""
    form: Any = params.structured_outputs
    if form is None:
        return
    limits.check_form(form)
    _check_end(form)
    try:
        _check(params)
    except VLLMValidationError as error:
        if error.__cause__ is not None or form.json is None:
            raise _refused(_kind(form), error) from error
        raise VLLMValidationError(_beyond(form.json)) from error
    except Exception as error:  # whatever xgrammar raises is about the form
        raise _refused(_kind(form), error) from error


def _check_end(form: Any) -> None:
    """xgrammar accepts a schema that no output can satisfy; the engine then fails at its first token."""
    schema: Any = limits.decoded(form.json)
    if isinstance(schema, dict) and _is_endless(schema, schema, {}):
        raise VLLMValidationError(
            "The JSON schema cannot be used: it refers to itself before it says anything: no answer fits it."
        )


def _is_endless(part: Any, schema: Any, found: dict[str, bool]) -> bool:
    """Whether every path through it recurses without end. found: results by reference; one still being
    resolved counts as endless.
    """
    if not isinstance(part, dict):
        return False
    part = cast("dict[str, Any]", part)
    reference = part.get("$ref")
    if isinstance(reference, str):
        if reference not in found:
            found[reference] = True
            found[reference] = _is_endless(_target(reference, schema), schema, found)
        if found[reference]:
            return True
    ways = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list) and part[name]]
    both = part.get("allOf")
    return any(all(_is_endless(one, schema, found) for one in way) for way in ways) or (
        isinstance(both, list) and any(_is_endless(one, schema, found) for one in both)
    )


def _target(reference: str, schema: Any) -> Any:
    """The target of a reference into the same schema; None for any other."""
    first, *names = reference.split("/")
    found = schema if first == "#" else None
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def check_tag(payload: Any, *, parameter: str) -> None:
    """As vLLM's check, called while the request is parsed. Raises: VLLMValidationError with the reason."""
    try:
        _check_tag(payload, parameter=parameter)
    except VLLMValidationError as error:
        raise _refused("structural tag", error, parameter) from error


def _refused(kind: str, error: BaseException, parameter: str | None = None) -> VLLMValidationError:
    while error.__cause__ is not None:
        error = error.__cause__
    reason = _PREFIX.sub("", _SOURCE.sub("", str(error))).strip()
    return VLLMValidationError(f"The {kind} cannot be used: {reason}", parameter=parameter)


def _kind(form: Any) -> str:
    given = {"JSON schema": form.json, "regex": form.regex, "grammar": form.grammar}
    return next((kind for kind, value in given.items() if value), "structural tag")


def _beyond(schema: Any) -> str:
    where, part = _part_beyond(limits.decoded(schema), "")
    return (
        f"The JSON schema cannot be used: at '{where or '/'}' it has {', '.join(part)}, which xgrammar "
        "cannot hold an answer to, alone or together."
    )


def _part_beyond(schema: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The smallest part that xgrammar rejects."""
    inside = cast("dict[str, Any]", schema).items() if isinstance(schema, dict) else enumerate(schema)
    for name, part in inside:
        if isinstance(part, dict | list) and _is_beyond({"": part}):
            return _part_beyond(part, f"{where}/{name}")
    return where, schema
