"""Translates errors of OpenAI-compatible servers, from bodies and from error events of streams.

A client's mistake keeps the server's message, which says what is allowed. Of a failure on our side nothing
but its status leaves the process.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, cast

from penstock.asgi import parsed
from penstock.errors import (
    BadRequest,
    Error,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Overloaded,
    PromptTooLong,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unsupported,
)

_TOO_LONG = re.compile(r"(maximum|model's) (context|model) length|exceeds the available context size")
"""vLLM, SGLang, llama.cpp."""
_NO_MODEL = re.compile(r"model .* does not exist", re.IGNORECASE)
_REPR = re.compile(r" \((parameter=.*|value=.*)\)$", re.DOTALL)
_NO_FORM = re.compile(r" but (?:none|multiple) are specified: \{.*$", re.DOTALL)
_PYDANTIC = re.compile(r"^\d+ validation errors?:")
_PYDANTIC_SAYS = re.compile(r"""'msg': ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
RETRY_AFTER_S = 1.0

_KINDS: Mapping[int, type[Error]] = {403: Unsupported} | {
    kind.status: kind for kind in (Unauthorized, MethodNotAllowed, TooLarge, Overloaded, Unsupported)
}

_CODES: dict[str, type[Error]] = {kind.code: kind for kind in (ModelNotFound, PromptTooLong)}
"""OpenAI's own codes, which some servers return."""


def heard(body: bytes, status: int | None = None) -> Error:
    """The error that a response with this status and body means; without a status, a stream's error event."""
    if status is None:
        body = body[body.find(b"data: ") + len(b"data: ") :].partition(b"\n")[0]
    message, param = said(body)
    fault: Any = (parsed(body) or {}).get("error")
    code = cast("dict[str, Any]", fault).get("code") if isinstance(fault, dict) else None
    if status is None:
        status = code if isinstance(code, int) else 500
    kind = _CODES.get(str(code))
    if kind is not None and status == kind.status:
        return kind(_sentence(message, param), **({"param": param} if param else {}))
    return error(status, message, param)


def error(status: int, message: str, param: str | None) -> Error:
    """The error for a server's message with this status."""
    message = _sentence(message, param)
    facts = {"param": param} if param else {}
    if status in (400, 422):
        return PromptTooLong(message, **facts) if _TOO_LONG.search(message) else BadRequest(message, **facts)
    if status == 404:
        return (
            ModelNotFound(message, param="model") if _NO_MODEL.search(message) else NotFound(message, **facts)
        )
    if status == 503:
        return Unavailable("The engine cannot take this request now.", retry_after_s=RETRY_AFTER_S)
    kind = _KINDS.get(status)
    return kind(message, **facts) if kind else Error()


def said(body: bytes) -> tuple[str, str | None]:
    """The message of a server's error, and the request field that it names."""
    found = parsed(body) or {}
    fault = found.get("error", found)
    if not isinstance(fault, dict):
        return str(fault), None
    fault = cast("dict[str, Any]", fault)
    detail = fault.get("message") or fault.get("detail")
    if isinstance(detail, list):
        return _of_fields(cast("list[Any]", detail))
    param = fault.get("param")
    field = param.removeprefix("body.") if isinstance(param, str) else None  # FastAPI says `body.file`
    return str(detail or "The request failed."), field


def _of_fields(details: list[Any]) -> tuple[str, str | None]:
    """FastAPI's own format: what is wrong with each field, without the request's values."""
    faults = [
        (".".join(str(part) for part in detail.get("loc", ())[1:]), str(detail.get("msg", "is not valid")))
        for detail in details
        if isinstance(detail, dict)
    ]
    message = "; ".join(f"{field}: {fault}" if field else fault for field, fault in faults)
    return f"{message or 'The request is not valid'}.", faults[0][0] or None if faults else None


def _sentence(message: str, param: str | None) -> str:
    """The server's message without Python's wrapping, and without the request's values."""
    if _PYDANTIC.match(message):
        found = dict.fromkeys(ast.literal_eval(text) for text in _PYDANTIC_SAYS.findall(message))
        said = f": {'; '.join(found)}" if any(found) else " is not valid"
        message = f"{param or 'The request'}{said}."
    message = _NO_FORM.sub(": json, json_object, regex, choice, grammar or structural_tag.", message)
    return " ".join(_REPR.sub("", message).split())
