"""vLLM's core that does not go deaf: the two threads between its sockets and its queues.

A request that the input thread cannot decode is answered with an error. If one of the threads ends all the
same, no request would ever be answered, so the process ends with it. Only `core` imports this file: it
imports vLLM.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import msgspec
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder

from penstock.engines.vllm.core import failure_reason

log = init_logger("vllm.penstock.sockets")


class Unreadable(EngineCoreRequest):
    """Stands for a request that cannot be decoded, under its id."""

    error: Exception | None = None


class Decoder(MsgpackDecoder):
    """As its base, but a request that cannot be decoded is `Unreadable`."""

    def decode(self, bufs: Any) -> Any:
        try:
            return super().decode(bufs)
        except Exception as error:
            fields = msgspec.msgpack.decode(bufs[0])
            if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
                raise
            return Unreadable(fields[0], None, None, None, None, 0.0, None, None, None, error=error)


core.MsgpackDecoder = Decoder  # pyright: ignore[reportPrivateImportUsage]


class AttentiveCore(EngineCoreProc):
    """Its base, and its process ends with either of its threads."""

    def preprocess_add_request(self, request: EngineCoreRequest) -> Any:
        """Of what this raises the base makes an answer to the request."""
        if isinstance(request, Unreadable):
            raise ValueError("The request cannot be decoded.") from request.error
        return super().preprocess_add_request(request)

    def process_input_sockets(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            super().process_input_sockets(*args, **kwargs)
        except BaseException as error:  # nothing else sees what ends a thread
            _end("takes requests", error)

    def process_output_sockets(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().process_output_sockets(*args, **kwargs)
        except BaseException as error:  # nothing else sees what ends a thread
            _end("gives answers", error)

    def _send_engine_dead(self) -> None:
        """The base calls it while it handles what ends the core; the front, once told, asks for that."""
        if (error := sys.exception()) is not None:
            failure_reason.leave(error)
        super()._send_engine_dead()


def _end(what: str, error: BaseException) -> NoReturn:
    """Of the process, now: the front sees it, and says why."""
    log.error("The thread that %s has failed.", what, exc_info=error)
    failure = RuntimeError(f"the core's thread that {what} failed: {failure_reason.describe(error)}")
    failure_reason.leave(failure)
    os._exit(1)
