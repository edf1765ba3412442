"""An engine core that survives requests it cannot decode, and ends when one of its socket threads does.

A request that the input thread cannot decode is answered with an error. Without either thread no request
would ever be answered, so the process ends with it. Importing this file imports vLLM.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import msgspec
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder

from penstock.engines.vllm.core import failure_reason

log = init_logger("vllm.penstock.sockets")


class Unreadable(EngineCoreRequest):
    """Stands for a request that could not be decoded, under its id."""

    error: Exception | None = None


_FIELDS, _DEFAULTS = EngineCoreRequest.__struct_fields__, EngineCoreRequest.__struct_defaults__
_UNKNOWN = dict.fromkeys(_FIELDS[: len(_FIELDS) - len(_DEFAULTS)])
"""A request must have these fields. The versions of vLLM differ in them."""


class Decoder(MsgpackDecoder):
    """Decodes requests; one that it cannot decode becomes `Unreadable`."""

    def decode(self, bufs: Any) -> Any:
        try:
            return super().decode(bufs)
        except Exception as error:
            fields = msgspec.msgpack.decode(bufs[0])
            if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
                raise
            given: dict[str, Any] = {**_UNKNOWN, "request_id": fields[0], "error": error}
            return Unreadable(**given)


core.MsgpackDecoder = Decoder  # pyright: ignore[reportPrivateImportUsage]


class AttentiveCore(EngineCoreProc):
    """An engine core whose process ends with either of its socket threads."""

    def preprocess_add_request(self, request: EngineCoreRequest) -> Any:
        """What this raises, the base turns into an error for the request."""
        if isinstance(request, Unreadable):
            raise ValueError("The request cannot be decoded.") from request.error
        return super().preprocess_add_request(request)

    def process_input_sockets(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            super().process_input_sockets(*args, **kwargs)
        except BaseException as error:  # nothing else notices the end of a thread
            _end("takes requests", error)

    def process_output_sockets(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().process_output_sockets(*args, **kwargs)
        except BaseException as error:  # nothing else notices the end of a thread
            _end("gives answers", error)

    def _send_engine_dead(self) -> None:
        """The base calls it while it handles a fatal error; the front-end then asks for the reason."""
        if (error := sys.exception()) is not None:
            failure_reason.leave(error)
        super()._send_engine_dead()


class AttentiveGangCore(AttentiveCore, DPEngineCoreProc):
    """The same for a core of a gang. The order of the bases matters."""


def _end(what: str, error: BaseException) -> NoReturn:
    """Ends the process now: the front-end notices and reports why."""
    log.error("The thread that %s has failed.", what, exc_info=error)
    failure = RuntimeError(f"the core's thread that {what} failed: {failure_reason.describe(error)}")
    failure_reason.leave(failure)
    os._exit(1)
