"""A replica's side of the link: it says hello to each gateway, then reports its state and load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from penstock.asgi import Receive, Send, disconnected
from penstock.engine import Load
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.layers.adapters import Store
from penstock.serve.replica.tiers.share import BatchShare
from penstock.transport import link

_EARLY_S = 0.002  # by which a loop's timer may fire before its time


@dataclass(frozen=True, slots=True)
class StatusSource:
    """Callbacks for what a replica reports, and for what a gateway tells it.

    add_aliases: names that gateways take for the model.
    hello: `model_id`, `max_model_len`, `kv_tokens`. weights: their version. adapters: of a model that takes
    some. batch: None where nothing limits batch. version: of the model and how it is served; "" when unknown.
    After a change of `hello`, `state` or the loaded adapters, call `StatusLinks.notify`.
    """

    load: Callable[[], Load]
    hello: Callable[[], link.Hello]
    state: Callable[[], link.State] = lambda: "ready"
    weights: Callable[[], str] = lambda: DEFAULT_WEIGHTS
    adapters: Store | None = None
    batch: BatchShare | None = None
    add_aliases: Callable[[Iterable[str]], None] = lambda names: None
    version: str = ""

    def serves(self) -> str:
        """As in `LoadReport`."""
        return f"{self.version} {self.weights()}" if self.version else ""


@dataclass(eq=False, slots=True)
class StatusLinks:
    """The links to all gateways. An idle replica is woken by its first request, and by beats alone.

    elsewhere: open requests from other gateways than the given one. tokens_before: of prompts that the engine
    does not have yet, by the number of online requests that it has. open_requests: all of them.
    """

    _source: StatusSource
    _elsewhere: Callable[[bytes], int]
    _tokens_before: Callable[[int], int]
    _open_requests: Collection[object]
    _resting: bool = False  # whether a link waits for its next beat: there was nothing to do
    _draining: bool = False
    _ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # set, and replaced, to report at once

    def notify(self) -> None:
        """Reports changes now, instead of within `COALESCE_S`, or `BEAT_S` of an idle replica."""
        self._resting = False
        self._changed.set()
        self._changed = asyncio.Event()

    def request_began(self) -> None:
        """Called for each, after it is in `open_requests`: while there are some, load is looked at often."""
        if self._resting:
            self.notify()

    def drain(self) -> None:
        """Gateways send no new requests from now on."""
        self._draining = True
        self.notify()

    def end(self) -> None:
        """Gateways take this replica for dead."""
        self._ended = True
        self.notify()

    async def serve(self, gateway: bytes, receive: Receive, send: Send) -> None:
        """Answers a gateway's request for its link, until either side ends it."""
        gone = asyncio.create_task(disconnected(receive))
        headers = [(b"content-type", b"application/x-ndjson")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._report_to(gateway, send, gone)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    async def _report_to(self, gateway: bytes, send: Send, gone: asyncio.Task[None]) -> None:
        last_hello, last_adapters, last_report, beat_due = None, None, None, 0.0
        while not gone.done() and not self._ended:
            changed = self._changed
            if (hello := self._source.hello()) != last_hello:
                await _send_line(send, hello)
                last_hello = hello
            if self._source.adapters:
                adapters = link.AdapterReport(tuple(sorted(self._source.adapters.loaded())))
                if adapters != last_adapters:
                    await _send_line(send, adapters)
                    last_adapters = adapters
            report = self._report(gateway)
            if report != last_report or time.monotonic() >= beat_due - _EARLY_S:
                await _send_line(send, report)
                last_report, beat_due = report, time.monotonic() + link.BEAT_S
            wait_s = link.COALESCE_S
            if not (report.running or report.waiting or self._open_requests):
                self._resting, wait_s = True, beat_due - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait_s)

    def _report(self, gateway: bytes) -> link.LoadReport:
        load, batch = self._source.load(), self._source.batch
        online = load.running + load.waiting - (batch.running if batch else 0)
        return link.LoadReport(
            state="draining" if self._draining else self._source.state(),
            running=load.running,
            waiting=load.waiting,
            # Batch that has its turn and is not in the engine yet makes the difference too small to tell.
            waiting_tokens=load.waiting_tokens + (self._tokens_before(online) if online >= 0 else 0),
            kv_usage=round(load.kv_usage, 2),
            elsewhere=self._elsewhere(gateway),
            batch_limit=batch.limit if batch else None,
            batch_running=batch.running if batch else 0,
            batch_waiting=batch.waiting if batch else 0,
            batch_requeued=batch.requeued if batch else 0,
            serves=self._source.serves(),
        )


async def _send_line(send: Send, message: link.Message) -> None:
    await send({"type": "http.response.body", "body": link.line(message), "more_body": True})
