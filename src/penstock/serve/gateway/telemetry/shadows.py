"""Shadow requests: another version answers the same request, and nobody waits for it.

Their answers may be written to a file, beside the clients' own. It knows neither replicas nor clients.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from prometheus_client import Counter

from penstock.asgi import Message, Send
from penstock.errors import Error

log = logging.getLogger(__name__)

_MOST, _LIMIT_S = 16, 120.0  # at a time, and how long each of them may take, with its client's
_MOST_BYTES = 1 << 20  # of an answer


class ShadowAnswer(msgspec.Struct):
    """As it was sent; a stream as its events."""

    version: str
    status: int = 0
    seconds: float = 0.0
    text: str = ""


class Shadow(msgspec.Struct, frozen=True):
    """One request. file: for both answers, with `about`. client: its answer, once it has ended."""

    version: str
    ask: Callable[[Send], Awaitable[None]]
    file: str | None
    about: dict[str, Any]
    client: asyncio.Future[ShadowAnswer]


class Shadows:
    """Of one gateway."""

    def __init__(self, counter: Counter) -> None:
        """counter: by version and outcome."""
        self._counter = counter
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, shadow: Shadow) -> asyncio.Task[None] | None:
        """Asks the version in the background, or returns None where too many are open."""
        if len(self._tasks) >= _MOST:
            self._counter.labels(shadow.version, "skipped").inc()
            return None
        self._tasks.add(task := asyncio.create_task(self._run(shadow)))
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, shadow: Shadow) -> None:
        answer, text, begun = ShadowAnswer(shadow.version), bytearray(), time.monotonic()

        async def send(message: Message) -> None:
            answer.status = message.get("status", answer.status)
            text.extend(message.get("body", b""))
            if len(text) > _MOST_BYTES:
                raise ValueError(f"the answer is longer than {_MOST_BYTES} bytes")

        outcome = "failed"
        try:
            async with asyncio.timeout(_LIMIT_S):
                await shadow.ask(send)
                outcome = "ok" if answer.status < 400 else "failed"
                if shadow.file is not None:
                    answer.text, answer.seconds = text.decode(errors="replace"), time.monotonic() - begun
                    row = {"at": time.time(), **shadow.about, "answers": [await shadow.client, answer]}
                    await asyncio.to_thread(_append, shadow.file, msgspec.json.encode(row))
        except (Error, OSError, ValueError) as error:  # also when it took too long
            log.info("A shadow request to %s has failed: %r", shadow.version, error)
        finally:
            self._counter.labels(shadow.version, outcome).inc()

    async def close(self) -> None:
        """Ends them all."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _append(file: str, line: bytes) -> None:
    line = msgspec.json.format(line, indent=-1)  # the client's own JSON may have several lines
    with open(file, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as out:  # gateways share it
        out.write(line + b"\n")
