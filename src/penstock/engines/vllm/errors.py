"""Translates vLLM's errors: exceptions of its Python calls, and error responses of its application."""

from __future__ import annotations

from penstock.engines import foreign
from penstock.errors import EngineDead, Error, TooLarge, Unavailable

_TOO_LARGE_AUDIO = "Maximum file size exceeded"
_TEMPLATE_TIMEOUT = "Chat template rendering timed out"
_SENTENCE = 200  # bytes of an error's body in which its message begins


def from_exception(error: Exception) -> Error:
    """The Penstock error for `error`, raised by one of vLLM's calls."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, Error):
        return error
    if isinstance(error, EngineDeadError):
        return EngineDead("The engine behind this replica is gone.")
    if isinstance(error, VLLMNotFoundError):
        return _meant(foreign.error(404, str(error), None))
    if isinstance(error, VLLMClientError | ValueError | TypeError):
        return _meant(foreign.error(400, str(error), getattr(error, "parameter", None)))
    if isinstance(error, TimeoutError) and _TEMPLATE_TIMEOUT in str(error):
        return _busy()
    if isinstance(error, GracefulHTTPError):
        return foreign.error(503, str(error), None)
    if isinstance(error, NotImplementedError):
        return foreign.error(501, str(error), None)
    return Error()


def reraise_unless_refused(error: Exception) -> None:
    """Raises: Error that the caller must not call a refusal: one of ours, or the engine's death."""
    if isinstance(error, Error):
        raise error
    if isinstance(meant := from_exception(error), EngineDead):
        raise meant from error


def heard(body: bytes, status: int | None = None) -> Error:
    """As `foreign.heard`, for responses of vLLM's application."""
    if status in (None, 500) and _TEMPLATE_TIMEOUT.encode() in body[:_SENTENCE]:
        return _busy()
    return _meant(foreign.heard(body, status))


def _busy() -> Error:
    """vLLM's limit counts the time in its queue, too."""
    return Unavailable("The engine has too many prompts to tokenize.", retry_after_s=foreign.RETRY_AFTER_S)


def _meant(error: Error) -> Error:
    if str(error) != _TOO_LARGE_AUDIO:
        return error
    from vllm import envs

    limit = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
    return TooLarge(
        f"The audio file is larger than {limit} MiB, the limit of this server "
        "(VLLM_MAX_AUDIO_CLIP_FILESIZE_MB). Send it in parts, or in a format that takes less.",
        param="file",
    )
