"""vLLM's errors in our words: from exceptions of its Python calls, and from bodies of its HTTP answers.

A client's mistake keeps vLLM's sentence, which says what is allowed. Of a failure on our side nothing leaves
the process but its status.
"""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

from penstock.errors import (
    BadRequest,
    EngineDead,
    Error,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    PromptTooLong,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unsupported,
)

_TOO_LONG = re.compile(r"maximum (context|model) length")
_NO_MODEL = re.compile(r"model .* does not exist", re.IGNORECASE)
_REPR = re.compile(r" \((parameter=.*|value=.*)\)$", re.DOTALL)
_NO_FORM = re.compile(r" but (?:none|multiple) are specified: \{.*$", re.DOTALL)
_PYDANTIC = re.compile(r"^\d+ validation errors?:")
_PYDANTIC_SAYS = re.compile(r"""'msg': (?:'([^']*)'|"([^"]*)")""")
_TOO_LARGE_AUDIO = "Maximum file size exceeded"
_RETRY_AFTER_S = 1.0


def from_exception(error: Exception) -> Error:
    """What `error`, raised by one of vLLM's calls, means to the caller."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, Error):
        return error
    if isinstance(error, EngineDeadError):
        return EngineDead("The engine behind this replica is gone.")
    if isinstance(error, VLLMNotFoundError):
        return _error(404, str(error), None)
    if isinstance(error, VLLMClientError | ValueError | TypeError):
        return _error(400, str(error), getattr(error, "parameter", None))
    if isinstance(error, GracefulHTTPError):
        return _error(503, str(error), None)
    if isinstance(error, NotImplementedError):
        return _error(501, str(error), None)
    return Error()


def from_body(status: int, body: bytes) -> Error:
    """What an answer of vLLM's app with this status and body means."""
    message, param = _said(body)
    return _error(status, message, param)


def from_event(event: bytes) -> Error:
    """What a stream's error event means; its status stands in the event."""
    body = event[event.find(b"data: ") + len(b"data: ") :]
    message, param = _said(body)
    return _error(_status(body), message, param)


def _error(status: int, message: str, param: str | None) -> Error:
    message = _sentence(message, param)
    if message == _TOO_LARGE_AUDIO:
        return _too_large_audio()
    facts = {"param": param} if param else {}
    if status in (400, 422):
        return PromptTooLong(message, **facts) if _TOO_LONG.search(message) else BadRequest(message, **facts)
    if status == 404:
        return ModelNotFound(message, param="model") if _NO_MODEL.search(message) else NotFound(message)
    if status == 503:
        return Unavailable("The engine cannot take this request now.", retry_after_s=_RETRY_AFTER_S)
    kinds: dict[int, type[Error]] = {401: Unauthorized, 405: MethodNotAllowed, 501: Unsupported}
    kind = kinds.get(status)
    return kind(message) if kind else Error()


def _too_large_audio() -> Error:
    from vllm import envs

    limit = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
    return TooLarge(
        f"The audio file is larger than {limit} MiB, the limit of this server "
        "(VLLM_MAX_AUDIO_CLIP_FILESIZE_MB). Send it in parts, or in a format that takes less.",
        param="file",
    )


def _sentence(message: str, param: str | None) -> str:
    """vLLM's sentence without the Python around it, and without what the request held."""
    if _PYDANTIC.match(message):
        found = [one or other for one, other in _PYDANTIC_SAYS.findall(message)]
        message = f"{param or 'The request'}: {'; '.join(dict.fromkeys(found)) or 'is not valid'}."
    message = _NO_FORM.sub(": json, json_object, regex, choice, grammar or structural_tag.", message)
    return " ".join(_REPR.sub("", message).split())


def _said(body: bytes) -> tuple[str, str | None]:
    said = _decode(body)
    error = said.get("error", said)
    if not isinstance(error, dict):
        return str(error), None
    error = cast("dict[str, Any]", error)
    return str(error.get("message") or error.get("detail") or "The request failed."), _param(error)


def _param(error: dict[str, Any]) -> str | None:
    """A form's fields are named as FastAPI finds them, `body.file`."""
    param = error.get("param")
    return param.removeprefix("body.") if isinstance(param, str) else None


def _status(body: bytes) -> int:
    error = _decode(body).get("error")
    code = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _decode(body: bytes) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}
